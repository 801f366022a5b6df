/* Static tensors: those that a recording reads where they are still have their metadata and their address.

   Through torch's C ABI this takes some 15 ns a tensor, and as much again or twice that for the getter of
   ``requires_grad``, which is not asked where nothing in the recording depends on it; the tables here are small, and what is behind the tensors is asked for ahead, as a model of many is in no fast cache between two
   calls. Where that was not found, torch's own comparison of metadata is
   called, and each tensor is asked for its address: some 150 ns. */
#include "torch_abi.h"

/* What is known of a tensor without the ABI. */
typedef struct {
    PyTypeObject *type;
    uint64_t address;
} Plain;

typedef struct {
    PyObject_HEAD
    Py_ssize_t count;
    PyObject **tensors;
    KnownTensor *known; /* of each, with the ABI */
    Plain *plain;       /* without it */
    PyObject *metadata; /* a function of no arguments, or None with the ABI */
    int asks_gradient;  /* they require a gradient as they did */
    vectorcallfunc vectorcall;
} StaticTensors;

static PyTypeObject StaticTensorsType;

int is_static_tensors(PyObject *object)
{
    return Py_TYPE(object) == &StaticTensorsType;
}

/* All tensors are at the addresses where they were, asked without the ABI: 1, 0, -1. */
static int same_addresses(StaticTensors *self)
{
    for (Py_ssize_t i = 0; i < self->count; i++) {
        uint64_t address = 0;
        if (address_of(self->tensors[i], &address) < 0)
            return -1;
        if (address != self->plain[i].address)
            return 0;
    }
    return 1;
}

int static_tensors_hold(PyObject *object)
{
    StaticTensors *self = (StaticTensors *)object;
    if (self->metadata == Py_None)
        return are_as_known(self->tensors, self->known, self->count);
    for (Py_ssize_t i = 0; i < self->count; i++)
        if (Py_TYPE(self->tensors[i]) != self->plain[i].type)
            return 0;
    int same = truth_of(PyObject_CallNoArgs(self->metadata));
    return same > 0 ? same_addresses(self) : same;
}

static PyObject *static_tensors_call(PyObject *self, PyObject *const *args, size_t nargsf, PyObject *names)
{
    (void)args;
    if (PyVectorcall_NARGS(nargsf) || names != NULL) {
        PyErr_SetString(PyExc_TypeError, "static tensors take no arguments");
        return NULL;
    }
    int same = static_tensors_hold(self);
    return same < 0 ? NULL : PyBool_FromLong(same);
}

static int static_tensors_traverse(PyObject *object, visitproc visit, void *arg)
{
    StaticTensors *self = (StaticTensors *)object;
    for (Py_ssize_t i = 0; i < self->count; i++)
        Py_VISIT(self->tensors[i]);
    Py_VISIT(self->metadata);
    return 0;
}

static int static_tensors_clear(PyObject *object)
{
    StaticTensors *self = (StaticTensors *)object;
    while (self->count) {
        PyObject *one = self->tensors[--self->count];
        forget_tensor(&self->known[self->count]);
        Py_DECREF(one);
    }
    return 0;
}

static void static_tensors_dealloc(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    static_tensors_clear(self);
    Py_XDECREF(((StaticTensors *)self)->metadata);
    PyMem_Free(((StaticTensors *)self)->tensors);
    PyMem_Free(((StaticTensors *)self)->known);
    PyMem_Free(((StaticTensors *)self)->plain);
    Py_TYPE(self)->tp_free(self);
}

/* Notes what is known of one tensor: 0, -1. */
static int take_tensor(StaticTensors *self, Py_ssize_t at, PyObject *tensor)
{
    if (self->metadata != Py_None) {
        self->plain[at].type = Py_TYPE(tensor);
        if (address_of(tensor, &self->plain[at].address) < 0)
            return -1;
    } else if (!is_plain_tensor(tensor)) {
        PyErr_SetString(PyExc_TypeError, "this is no plain tensor");
        return -1;
    } else if (know_tensor(tensor, &self->known[at]) < 0) {
        return -1;
    } else {
        if (!self->asks_gradient)
            self->known[at].geometry->requires = EITHER;
        share_geometry(&self->known[at], self->known, at);
    }
    self->tensors[at] = Py_NewRef(tensor);
    self->count = at + 1;
    return 0;
}

static PyObject *static_tensors_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"tensors", "metadata", "asks_gradient", NULL};
    PyObject *given, *metadata;
    int asks_gradient = 1;
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "O!O|p", names, &PyTuple_Type, &given, &metadata, &asks_gradient))
        return NULL;
    if (metadata == Py_None && !abi_is_known()) {
        PyErr_SetString(PyExc_TypeError, "without torch's C ABI a function has to compare the metadata");
        return NULL;
    }
    StaticTensors *self = (StaticTensors *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->vectorcall = static_tensors_call;
    self->metadata = Py_NewRef(metadata);
    self->asks_gradient = asks_gradient;
    size_t room = (size_t)PyTuple_GET_SIZE(given) + 1;
    self->tensors = PyMem_Calloc(room, sizeof(*self->tensors));
    self->known = PyMem_Calloc(room, sizeof(*self->known));
    self->plain = metadata == Py_None ? NULL : PyMem_Calloc(room, sizeof(*self->plain));
    if (self->tensors == NULL || self->known == NULL || (metadata != Py_None && self->plain == NULL)) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(given); i++)
        if (take_tensor(self, i, PyTuple_GET_ITEM(given, i)) < 0) {
            Py_DECREF(self);
            return NULL;
        }
    return (PyObject *)self;
}

static PyTypeObject StaticTensorsType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "capture.native._native.StaticTensors",
    .tp_doc = "Tells whether tensors still have the metadata and the address that they had.",
    .tp_basicsize = sizeof(StaticTensors),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(StaticTensors, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_new = static_tensors_new,
    .tp_dealloc = static_tensors_dealloc,
    .tp_traverse = static_tensors_traverse,
    .tp_clear = static_tensors_clear,
};

int add_static_tensors(PyObject *module)
{
    if (PyType_Ready(&StaticTensorsType) < 0)
        return -1;
    return PyModule_AddObjectRef(module, "StaticTensors", (PyObject *)&StaticTensorsType);
}
