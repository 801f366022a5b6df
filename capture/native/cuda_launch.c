/* Launch: one recorded graph, launched by the driver itself. ``cuda_copies.c`` points it at its inputs. */
#include "native.h"

typedef struct {
    PyObject_HEAD
    PyObject *slow;    /* the same in Python, for what is not as usual: takes the leaves */
    PyObject *pool;    /* its ``ran_on`` and ``beside`` tell where the last launch ran */
    PyObject *stream_of; /* index of a device -> handle of the current stream */
    PyObject *device;  /* index of the current device */
    PyObject *index;
    PyObject *copies;  /* Copies, or None */
    PyObject *copy_in; /* in Python, or None: takes the leaves */
    void *executable;
    vectorcallfunc vectorcall;
} Launch;

static PyTypeObject LaunchType;

int is_launch(PyObject *one)
{
    return Py_TYPE(one) == &LaunchType;
}

static int call_with(PyObject *function, PyObject *const *leaves, Py_ssize_t count)
{
    PyObject *list = list_of(leaves, count);
    PyObject *result = list == NULL ? NULL : PyObject_CallOneArg(function, list);
    Py_XDECREF(list);
    Py_XDECREF(result);
    return result == NULL ? -1 : 0;
}

/* 1 and the current stream if it is the one that the last launch ran on, with nothing beside it; else 0 or -1. */
static int is_usual(Launch *self, void **stream)
{
    PyObject *here = PyObject_CallNoArgs(self->device);
    if (here == NULL)
        return -1;
    int same = PyObject_RichCompareBool(here, self->index, Py_EQ);
    Py_DECREF(here);
    if (same <= 0)
        return same;
    PyObject *beside = SLOT(self->pool, CudaPool, beside);
    Py_ssize_t others = beside == NULL ? -1 : PySet_Size(beside);
    if (others)
        return others < 0 ? -1 : 0;
    PyObject *now = PyObject_CallOneArg(self->stream_of, self->index);
    if (now == NULL)
        return -1;
    PyObject *ran_on = SLOT(self->pool, CudaPool, ran_on);
    same = ran_on == NULL ? -1 : PyObject_RichCompareBool(now, ran_on, Py_EQ);
    if (same > 0) {
        *stream = PyLong_AsVoidPtr(now);
        same = *stream == NULL && PyErr_Occurred() ? -1 : 1;
    }
    Py_DECREF(now);
    return same;
}

int launch_run(PyObject *object, PyObject *const *leaves, const uint64_t *addresses, Py_ssize_t count)
{
    Launch *self = (Launch *)object;
    void *stream = NULL;
    if (self->slow == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "the recording is being collected");
        return -1;
    }
    int usual = is_usual(self, &stream), failed = 0;
    if (usual < 0 || (usual && self->copy_in != Py_None && call_with(self->copy_in, leaves, count) < 0))
        return -1;
    if (usual && self->copies != Py_None)
        usual = copies_point(self->copies, addresses) == 0;
    if (usual && self->executable != NULL) {
        Py_BEGIN_ALLOW_THREADS /* the driver waits where too much is queued */
        failed = driver.launch(self->executable, stream);
        Py_END_ALLOW_THREADS
    }
    return usual && !failed ? 0 : call_with(self->slow, leaves, count); /* torch words what is wrong */
}

static PyObject *launch_call(PyObject *self, PyObject *const *args, size_t nargsf, PyObject *names)
{
    if (PyVectorcall_NARGS(nargsf) != 1 || names != NULL) {
        PyErr_SetString(PyExc_TypeError, "a launch takes the leaves of the call");
        return NULL;
    }
    PyObject *leaves = PySequence_Fast(args[0], "leaves are a sequence");
    if (leaves == NULL)
        return NULL;
    Py_ssize_t count = PySequence_Fast_GET_SIZE(leaves);
    PyObject *const *items = PySequence_Fast_ITEMS(leaves);
    uint64_t addresses[MOST_VALUES];
    Launch *launch = (Launch *)self;
    int failed;
    if (launch->copies != NULL && launch->copies != Py_None)
        failed = copies_read(launch->copies, items, count, addresses);
    else
        failed = 0;
    failed = failed || launch_run(self, items, addresses, count);
    Py_DECREF(leaves);
    return failed ? NULL : Py_NewRef(Py_None);
}

static int launch_traverse(PyObject *object, visitproc visit, void *arg)
{
    Launch *self = (Launch *)object;
    Py_VISIT(self->slow);
    Py_VISIT(self->pool);
    Py_VISIT(self->stream_of);
    Py_VISIT(self->device);
    Py_VISIT(self->index);
    Py_VISIT(self->copies);
    Py_VISIT(self->copy_in);
    return 0;
}

static int launch_clear(PyObject *object)
{
    Launch *self = (Launch *)object;
    Py_CLEAR(self->slow);
    Py_CLEAR(self->pool);
    Py_CLEAR(self->stream_of);
    Py_CLEAR(self->device);
    Py_CLEAR(self->index);
    Py_CLEAR(self->copies);
    Py_CLEAR(self->copy_in);
    return 0;
}

static void launch_dealloc(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    launch_clear(self);
    Py_TYPE(self)->tp_free(self);
}

static PyObject *launch_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *slow, *pool, *stream_of, *device, *index, *copies, *copy_in;
    unsigned long long executable;
    static char *names[] = {
        "slow", "pool", "stream_of", "device", "index", "executable", "copies", "copy_in", NULL};
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "$OOOOO!KOO", names, &slow, &pool, &stream_of, &device, &PyLong_Type, &index, &executable,
            &copies, &copy_in))
        return NULL;
    if (driver.launch == NULL || (copies != Py_None && !is_copies(copies))) {
        PyErr_SetString(PyExc_TypeError, "no driver, or no copies");
        return NULL;
    }
    if (!is_of(pool, slots.CudaPool.type))
        return NULL;
    Launch *self = (Launch *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->vectorcall = launch_call;
    self->slow = Py_NewRef(slow);
    self->pool = Py_NewRef(pool);
    self->stream_of = Py_NewRef(stream_of);
    self->device = Py_NewRef(device);
    self->index = Py_NewRef(index);
    self->copies = Py_NewRef(copies);
    self->copy_in = Py_NewRef(copy_in);
    self->executable = (void *)(uintptr_t)executable;
    return (PyObject *)self;
}

static PyTypeObject LaunchType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "capture.native._native.Launch",
    .tp_doc = "Launches one graph on a call's inputs.",
    .tp_basicsize = sizeof(Launch),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(Launch, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_new = launch_new,
    .tp_dealloc = launch_dealloc,
    .tp_traverse = launch_traverse,
    .tp_clear = launch_clear,
};

int add_launch(PyObject *module)
{
    if (PyType_Ready(&LaunchType) < 0)
        return -1;
    return PyModule_AddObjectRef(module, "Launch", (PyObject *)&LaunchType);
}
