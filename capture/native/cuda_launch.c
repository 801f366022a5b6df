/* Launch: one recorded graph, launched by the driver itself. ``cuda_copies.c`` points it at its inputs. */
#include "native.h"

typedef struct {
    PyObject_HEAD
    PyObject *slow;    /* the launch in Python, for calls that differ from the last one; takes the leaves */
    PyObject *pool;    /* its ``ran_on`` and ``beside`` tell where the last launch ran */
    Caller stream;     /* gives the handle of the current stream on the graph's device */
    Caller device;     /* gives the index of the current device */
    long index;        /* index of the graph's device */
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

/* A number that a call gives: 0, or -1 with an exception set. */
static int number_from(const Caller *caller, long *number)
{
    PyObject *found = call_again(caller);
    *number = found == NULL ? -1 : PyLong_AsLong(found);
    Py_XDECREF(found);
    return *number == -1 && PyErr_Occurred() ? -1 : 0;
}

static int handle_from(const Caller *caller, void **handle)
{
    PyObject *found = call_again(caller);
    *handle = found == NULL ? NULL : PyLong_AsVoidPtr(found);
    Py_XDECREF(found);
    return *handle == NULL && PyErr_Occurred() ? -1 : 0;
}

/* 1 and the current stream if it is the one that the last launch ran on, with nothing beside it; else 0 or -1. */
static int is_usual(Launch *self, const Where *where, void **stream)
{
    long here = where->device;
    if (!where->is_known && number_from(&self->device, &here) < 0)
        return -1;
    if (here != self->index)
        return 0;
    PyObject *beside = SLOT(self->pool, CudaPool, beside);
    Py_ssize_t others = beside == NULL ? -1 : PySet_Size(beside);
    if (others)
        return others < 0 ? -1 : 0;
    *stream = where->stream;
    if (!where->is_known && handle_from(&self->stream, stream) < 0)
        return -1;
    PyObject *ran_on = SLOT(self->pool, CudaPool, ran_on);
    if (ran_on == NULL || ran_on == Py_None)
        return ran_on == NULL ? -1 : 0;
    void *last = PyLong_AsVoidPtr(ran_on);
    return last == NULL && PyErr_Occurred() ? -1 : last == *stream;
}

int launch_run(
    PyObject *object, PyObject *const *leaves, const uint64_t *addresses, Py_ssize_t count, const Where *where)
{
    Launch *self = (Launch *)object;
    void *stream = NULL;
    if (self->slow == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "the recording is being collected");
        return -1;
    }
    int usual = is_usual(self, where, &stream), failed = 0;
    if (usual < 0 || (usual && self->copy_in != Py_None && call_with(self->copy_in, leaves, count) < 0))
        return -1;
    if (usual && self->copies != Py_None)
        usual = copies_point(self->copies, addresses) == 0;
    if (usual && self->executable != NULL) {
        Py_BEGIN_ALLOW_THREADS /* the driver waits where too much is queued */
        failed = driver.launch(self->executable, stream);
        Py_END_ALLOW_THREADS
    }
    return usual && !failed ? 0 : call_with(self->slow, leaves, count); /* by torch: errors have torch's text */
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
    const Where asked = {0, 0, NULL};
    failed = failed || launch_run(self, items, addresses, count, &asked);
    Py_DECREF(leaves);
    return failed ? NULL : Py_NewRef(Py_None);
}

static int launch_traverse(PyObject *object, visitproc visit, void *arg)
{
    Launch *self = (Launch *)object;
    Py_VISIT(self->slow);
    Py_VISIT(self->pool);
    Py_VISIT(self->stream.function);
    Py_VISIT(self->device.function);
    Py_VISIT(self->copies);
    Py_VISIT(self->copy_in);
    return 0;
}

static int launch_clear(PyObject *object)
{
    Launch *self = (Launch *)object;
    Py_CLEAR(self->slow);
    Py_CLEAR(self->pool);
    forget_caller(&self->stream);
    forget_caller(&self->device);
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
    long number = PyLong_AsLong(index);
    PyObject *one = PyTuple_Pack(1, index), *none = PyTuple_New(0);
    Launch *self = one == NULL || none == NULL || PyErr_Occurred() ? NULL : (Launch *)type->tp_alloc(type, 0);
    if (self == NULL) {
        Py_XDECREF(one);
        Py_XDECREF(none);
        return NULL;
    }
    self->vectorcall = launch_call;
    self->slow = Py_NewRef(slow);
    self->pool = Py_NewRef(pool);
    self->stream = caller_of(stream_of, one);
    self->device = caller_of(device, none);
    self->index = number;
    Py_DECREF(one);
    Py_DECREF(none);
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

#define MOST_DEVICES 64

/* CaptureLook: whether somebody captures the current stream, asked of the driver, which takes a third of the time that
   torch's own function does. */
typedef struct {
    PyObject_HEAD
    PyObject *slow;      /* torch's function, for what the driver does not tell */
    PyObject *stream_of; /* index of a device -> handle of the current stream */
    Caller device;       /* gives the index of the current device */
    Caller streams[MOST_DEVICES]; /* gives the handle of the current stream on each, made at the first call there */
    vectorcallfunc vectorcall;
} CaptureLook;

static PyTypeObject CaptureLookType;

/* ``self->streams`` has a caller for the device: 1, 0; -1 with an exception set. */
static int is_known_device(CaptureLook *self, long device)
{
    if (device < 0 || device >= MOST_DEVICES)
        return 0;
    if (self->streams[device].function != NULL)
        return 1;
    PyObject *index = PyLong_FromLong(device), *one = index == NULL ? NULL : PyTuple_Pack(1, index);
    if (one != NULL)
        self->streams[device] = caller_of(self->stream_of, one);
    Py_XDECREF(one);
    Py_XDECREF(index);
    return one == NULL ? -1 : 1;
}

int is_captured(PyObject *object, Where *where)
{
    where->is_known = 0;
    if (Py_TYPE(object) != &CaptureLookType)
        return truth_of(PyObject_CallNoArgs(object));
    CaptureLook *self = (CaptureLook *)object;
    int status = 0, known = number_from(&self->device, &where->device);
    known = known < 0 ? -1 : is_known_device(self, where->device);
    if (known > 0 && handle_from(&self->streams[where->device], &where->stream) < 0)
        known = -1;
    if (known < 0)
        return -1;
    if (known && where->stream == NULL) { /* nobody can capture the legacy stream, and asking takes 4 us */
        where->is_known = 1;
        return 0;
    }
    if (!known || driver.is_capturing == NULL || driver.is_capturing(where->stream, &status) != 0)
        return truth_of(PyObject_CallNoArgs(self->slow));
    where->is_known = 1;
    return status != 0;
}

static PyObject *look_call(PyObject *self, PyObject *const *args, size_t nargsf, PyObject *names)
{
    (void)args;
    if (PyVectorcall_NARGS(nargsf) || names != NULL) {
        PyErr_SetString(PyExc_TypeError, "this takes no arguments");
        return NULL;
    }
    Where where;
    int captured = is_captured(self, &where);
    return captured < 0 ? NULL : PyBool_FromLong(captured);
}

/* Its functions are torch's own: they lead nowhere. */
static void look_dealloc(PyObject *object)
{
    CaptureLook *self = (CaptureLook *)object;
    Py_XDECREF(self->slow);
    Py_XDECREF(self->stream_of);
    forget_caller(&self->device);
    for (int i = 0; i < MOST_DEVICES; i++)
        forget_caller(&self->streams[i]);
    Py_TYPE(object)->tp_free(object);
}

static PyObject *look_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *slow, *stream_of, *device, *none;
    static char *names[] = {"slow", "stream_of", "device", NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "$OOO", names, &slow, &stream_of, &device) ||
        (none = PyTuple_New(0)) == NULL)
        return NULL;
    CaptureLook *self = (CaptureLook *)type->tp_alloc(type, 0);
    if (self != NULL) {
        self->vectorcall = look_call;
        self->slow = Py_NewRef(slow);
        self->stream_of = Py_NewRef(stream_of);
        self->device = caller_of(device, none);
    }
    Py_DECREF(none);
    return (PyObject *)self;
}

static PyTypeObject CaptureLookType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "capture.native._native.CaptureLook",
    .tp_doc = "Tells whether somebody captures the current stream.",
    .tp_basicsize = sizeof(CaptureLook),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(CaptureLook, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_new = look_new,
    .tp_dealloc = look_dealloc,
};

int add_launch(PyObject *module)
{
    if (PyType_Ready(&LaunchType) < 0 || PyType_Ready(&CaptureLookType) < 0 ||
        PyModule_AddObjectRef(module, "CaptureLook", (PyObject *)&CaptureLookType) < 0)
        return -1;
    return PyModule_AddObjectRef(module, "Launch", (PyObject *)&LaunchType);
}
