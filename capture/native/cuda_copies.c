/* Copies: nodes at the begin of one graph that copy a call's inputs into its buffers, from wherever the call has them.

   Another source is one call of the driver (0.5 us), where a copy on the stream is 3 us and more. */
#include "native.h"

typedef struct {
    void *node;
    Py_ssize_t position;
    uint64_t to, from;
    size_t nbytes;
} Copy;

typedef struct {
    PyObject_HEAD
    void *executable, *context;
    Py_ssize_t count;
    Copy *copies;
    vectorcallfunc vectorcall;
} Copies;

static PyTypeObject CopiesType;

int is_copies(PyObject *one)
{
    return Py_TYPE(one) == &CopiesType;
}

static CopyParams params_of(const Copy *copy)
{
    return (CopyParams){
        .source_type = DEVICE_MEMORY, .source = copy->from, .source_pitch = copy->nbytes, .source_height = 1,
        .target_type = DEVICE_MEMORY, .target = copy->to, .target_pitch = copy->nbytes, .target_height = 1,
        .width = copy->nbytes, .height = 1, .depth = 1};
}

int copies_point(PyObject *object, const uint64_t *addresses)
{
    Copies *self = (Copies *)object;
    for (Py_ssize_t i = 0; i < self->count; i++) {
        Copy *copy = &self->copies[i];
        uint64_t from = addresses[copy->position];
        if (copy->from == from)
            continue;
        copy->from = from;
        CopyParams params = params_of(copy);
        int failed = driver.set_copy(self->executable, copy->node, &params, self->context);
        if (failed) {
            copy->from = 0; /* whatever the node has now, it is set again before a launch */
            return failed;
        }
    }
    return 0;
}

int copies_read(PyObject *object, PyObject *const *leaves, Py_ssize_t count, uint64_t *addresses)
{
    Copies *self = (Copies *)object;
    for (Py_ssize_t i = 0; i < self->count; i++) {
        Py_ssize_t position = self->copies[i].position;
        if (position >= count) {
            PyErr_SetString(PyExc_IndexError, "a leaf is missing");
            return -1;
        }
        if (address_of(leaves[position], &addresses[position]) < 0)
            return -1;
    }
    return 0;
}

static PyObject *copies_call(PyObject *self, PyObject *const *args, size_t nargsf, PyObject *names)
{
    if (PyVectorcall_NARGS(nargsf) != 1 || names != NULL) {
        PyErr_SetString(PyExc_TypeError, "copies take the leaves of the call");
        return NULL;
    }
    PyObject *leaves = PySequence_Fast(args[0], "leaves are a sequence");
    if (leaves == NULL)
        return NULL;
    uint64_t addresses[MOST_VALUES];
    int read = copies_read(self, PySequence_Fast_ITEMS(leaves), PySequence_Fast_GET_SIZE(leaves), addresses);
    int failed = read < 0 ? 0 : copies_point(self, addresses);
    Py_DECREF(leaves);
    if (failed)
        PyErr_Format(PyExc_RuntimeError, "the driver lets no copy begin elsewhere (error %d)", failed);
    return read < 0 || failed ? NULL : Py_NewRef(Py_None);
}

/* New nodes before all others of a graph. 0, or an error of the driver; -1 with an exception set. */
static int add_nodes(Copies *self, void *graph)
{
    size_t count = 0;
    int failed = driver.roots(graph, NULL, &count);
    void **roots = failed ? NULL : PyMem_New(void *, count + 1), **mine = failed ? NULL : PyMem_New(void *, count + 1);
    if (!failed && (roots == NULL || mine == NULL)) {
        PyErr_NoMemory();
        failed = -1;
    }
    failed = failed ? failed : driver.roots(graph, roots, &count);
    for (Py_ssize_t i = 0; i < self->count && !failed; i++) {
        Copy *copy = &self->copies[i];
        CopyParams params = params_of(copy);
        failed = driver.add_copy(&copy->node, graph, NULL, 0, &params, self->context);
        for (size_t j = 0; j < count; j++)
            mine[j] = copy->node;
        if (!failed && count)
            failed = driver.depend_v2 != NULL ? driver.depend_v2(graph, mine, roots, NULL, count)
                                              : driver.depend(graph, mine, roots, count);
    }
    PyMem_Free(roots);
    PyMem_Free(mine);
    return failed;
}

static PyObject *copies_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *given;
    unsigned long long graph;
    static char *names[] = {"graph", "copies", NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "KO!", names, &graph, &PyTuple_Type, &given))
        return NULL;
    Copies *self = (Copies *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->vectorcall = copies_call;
    self->copies = PyMem_New(Copy, PyTuple_GET_SIZE(given) + 1);
    int failed = self->copies == NULL ? -1 : 0;
    if (failed)
        PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(given) && !failed; i++) {
        unsigned long long to, from;
        Copy *copy = &self->copies[i];
        *copy = (Copy){0};
        PyObject *one = PyTuple_GET_ITEM(given, i);
        failed = PyArg_ParseTuple(one, "nKKn", &copy->position, &to, &from, &copy->nbytes) ? 0 : -1;
        copy->to = to;
        copy->from = from;
        if (!failed && (copy->position < 0 || copy->position >= MOST_VALUES)) {
            PyErr_SetString(PyExc_ValueError, "no such position");
            failed = -1;
        }
    }
    if (!failed) {
        self->count = PyTuple_GET_SIZE(given);
        failed = driver.context == NULL ? 1 : driver.context(&self->context);
    }
    failed = failed ? failed : add_nodes(self, (void *)(uintptr_t)graph);
    if (failed > 0)
        PyErr_Format(PyExc_RuntimeError, "the driver adds no copies to a graph (error %d)", failed);
    if (failed)
        Py_CLEAR(self);
    return (PyObject *)self;
}

static PyObject *copies_use(PyObject *self, PyObject *executable)
{
    void *handle = PyLong_AsVoidPtr(executable);
    if (handle == NULL && PyErr_Occurred())
        return NULL;
    Copies *copies = (Copies *)self;
    /* Instantiated once more, it copies from where it did at first: all are set again before the next launch. */
    for (Py_ssize_t i = 0; copies->executable != NULL && i < copies->count; i++)
        copies->copies[i].from = 0;
    copies->executable = handle;
    Py_RETURN_NONE;
}

static PyObject *copies_nodes(PyObject *object, PyObject *Py_UNUSED(ignored))
{
    Copies *self = (Copies *)object;
    PyObject *found = PyList_New(self->count);
    for (Py_ssize_t i = 0; found != NULL && i < self->count; i++) {
        PyObject *node = PyLong_FromVoidPtr(self->copies[i].node);
        if (node == NULL)
            Py_CLEAR(found);
        else
            PyList_SET_ITEM(found, i, node);
    }
    return found;
}

static void copies_dealloc(PyObject *self)
{
    PyMem_Free(((Copies *)self)->copies);
    Py_TYPE(self)->tp_free(self);
}

static PyMethodDef methods[] = {
    {"use", copies_use, METH_O, "This is the instantiated graph that they are in."},
    {"nodes", copies_nodes, METH_NOARGS, "Handles of their nodes."},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject CopiesType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "capture.native._native.Copies",
    .tp_doc = "Nodes that copy a call's inputs into the buffers of a graph; called, they are pointed at these leaves.",
    .tp_basicsize = sizeof(Copies),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(Copies, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_new = copies_new,
    .tp_dealloc = copies_dealloc,
    .tp_methods = methods,
};

int add_copies(PyObject *module)
{
    return PyType_Ready(&CopiesType) < 0 ? -1 : PyModule_AddObjectRef(module, "Copies", (PyObject *)&CopiesType);
}
