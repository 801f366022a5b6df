/* AddressRanges: whether an address lies in one of a pool's segments, which each call asks of each of its tensors. */
#include "native.h"

typedef struct {
    PyObject_HEAD
    Py_ssize_t count;
    uint64_t *bounds; /* where ranges begin and end, in turn, in order */
} AddressRanges;

static PyTypeObject AddressRangesType;

int is_address_ranges(PyObject *one)
{
    return Py_TYPE(one) == &AddressRangesType;
}

int lies_in_ranges(PyObject *ranges, uint64_t address)
{
    const AddressRanges *self = (AddressRanges *)ranges;
    Py_ssize_t low = 0, high = self->count; /* how many bounds are at the address or before it: odd within a range */
    while (low < high) {
        Py_ssize_t middle = (low + high) / 2;
        if (self->bounds[middle] <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low & 1;
}

static PyObject *ranges_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *given;
    static char *names[] = {"bounds", NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!", names, &PyList_Type, &given))
        return NULL;
    AddressRanges *self = (AddressRanges *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->count = PyList_GET_SIZE(given);
    if ((self->bounds = PyMem_New(uint64_t, self->count + 1)) == NULL)
        PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < self->count && !PyErr_Occurred(); i++)
        self->bounds[i] = PyLong_AsUnsignedLongLong(PyList_GET_ITEM(given, i));
    if (PyErr_Occurred())
        Py_CLEAR(self);
    return (PyObject *)self;
}

static void ranges_dealloc(PyObject *self)
{
    PyMem_Free(((AddressRanges *)self)->bounds);
    Py_TYPE(self)->tp_free(self);
}

static PyObject *ranges_hold(PyObject *self, PyObject *address)
{
    uint64_t number = PyLong_AsUnsignedLongLong(address);
    return PyErr_Occurred() ? NULL : PyBool_FromLong(lies_in_ranges(self, number));
}

static PyMethodDef methods[] = {
    {"holds", ranges_hold, METH_O, "Whether the address lies in one of them."},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject AddressRangesType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "capture.native._native.AddressRanges",
    .tp_doc = "Ranges of addresses, given by where they begin and end, in turn, in order.",
    .tp_basicsize = sizeof(AddressRanges),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = ranges_new,
    .tp_dealloc = ranges_dealloc,
    .tp_methods = methods,
};

int add_address_ranges(PyObject *module)
{
    if (PyType_Ready(&AddressRangesType) < 0)
        return -1;
    return PyModule_AddObjectRef(module, "AddressRanges", (PyObject *)&AddressRangesType);
}
