/* Static tensors: those that a recording reads where they are still have their metadata and their address.

   Through torch's C ABI this takes some 20 ns a tensor. Where that was not found, torch's own comparison of metadata is
   called, and each tensor is asked for its address: some 150 ns. */
#include "torch_abi.h"

typedef struct {
    PyObject *tensor;
    PyTypeObject *type;
    KnownTensor known;
    uint64_t address; /* without the ABI */
} StaticTensor;

typedef struct {
    PyObject_HEAD
    Py_ssize_t count;
    StaticTensor *tensors;
    PyObject *metadata; /* a function of no arguments, or None with the ABI */
    vectorcallfunc vectorcall;
} StaticTensors;

static PyTypeObject StaticTensorsType;

int is_static_tensors(PyObject *object)
{
    return Py_TYPE(object) == &StaticTensorsType;
}

/* 1, 0, or -1 with an exception set. */
static int same_addresses(StaticTensors *self)
{
    for (Py_ssize_t i = 0; i < self->count; i++) {
        uint64_t address = 0;
        if (address_of(self->tensors[i].tensor, &address) < 0)
            return -1;
        if (address != self->tensors[i].address)
            return 0;
    }
    return 1;
}

int static_tensors_hold(PyObject *object)
{
    StaticTensors *self = (StaticTensors *)object;
    for (Py_ssize_t i = 0; i < self->count; i++) {
        StaticTensor *one = &self->tensors[i];
        int same = self->metadata == Py_None ? is_as_known(one->tensor, &one->known) : Py_TYPE(one->tensor) == one->type;
        if (same <= 0)
            return same;
    }
    if (self->metadata == Py_None)
        return 1;
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
        Py_VISIT(self->tensors[i].tensor);
    Py_VISIT(self->metadata);
    return 0;
}

static int static_tensors_clear(PyObject *object)
{
    StaticTensors *self = (StaticTensors *)object;
    while (self->count) {
        StaticTensor one = self->tensors[--self->count];
        forget_tensor(&one.known);
        Py_DECREF(one.tensor);
    }
    return 0;
}

static void static_tensors_dealloc(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    static_tensors_clear(self);
    Py_XDECREF(((StaticTensors *)self)->metadata);
    PyMem_Free(((StaticTensors *)self)->tensors);
    Py_TYPE(self)->tp_free(self);
}

static PyObject *static_tensors_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"tensors", "metadata", NULL};
    PyObject *given, *metadata;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O", names, &PyTuple_Type, &given, &metadata))
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
    self->tensors = PyMem_New(StaticTensor, PyTuple_GET_SIZE(given) + 1);
    if (self->tensors == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(given); i++) {
        StaticTensor *one = &self->tensors[i];
        *one = (StaticTensor){.tensor = PyTuple_GET_ITEM(given, i)};
        one->type = Py_TYPE(one->tensor);
        int plain = metadata != Py_None || is_plain_tensor(one->tensor);
        if (!plain)
            PyErr_SetString(PyExc_TypeError, "this is no plain tensor");
        int failed = !plain || (metadata == Py_None ? know_tensor(one->tensor, &one->known)
                                                    : address_of(one->tensor, &one->address)) < 0;
        if (failed) {
            Py_DECREF(self);
            return NULL;
        }
        Py_INCREF(one->tensor);
        self->count = i + 1;
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
