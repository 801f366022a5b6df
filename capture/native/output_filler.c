/* OutputFiller: puts the values of one call into the tuples and lists of its result. */
#include "native.h"

typedef struct {
    PyObject_HEAD
    PyObject *parts; /* a tuple: numbers of values, or functions that take the values */
    PyObject *close; /* makes the container of the list of its members; None: it is a tuple */
    vectorcallfunc vectorcall;
} OutputFiller;

/* One member of the container: a new reference. */
static PyObject *part_of(PyObject *part, PyObject *values)
{
    if (!PyLong_CheckExact(part))
        return PyObject_CallOneArg(part, values);
    Py_ssize_t number = PyLong_AsSsize_t(part);
    if (number < 0 || number >= PyList_GET_SIZE(values)) {
        PyErr_SetString(PyExc_IndexError, "no such value");
        return NULL;
    }
    return Py_NewRef(PyList_GET_ITEM(values, number));
}

static PyObject *filler_call(PyObject *object, PyObject *const *args, size_t nargsf, PyObject *names)
{
    OutputFiller *self = (OutputFiller *)object;
    if (PyVectorcall_NARGS(nargsf) != 1 || names != NULL) {
        PyErr_SetString(PyExc_TypeError, "a filler takes the values of a call");
        return NULL;
    }
    PyObject *values = PyList_CheckExact(args[0]) ? Py_NewRef(args[0]) : PySequence_List(args[0]);
    Py_ssize_t count = PyTuple_GET_SIZE(self->parts);
    int is_tuple = self->close == Py_None;
    PyObject *made = values == NULL ? NULL : is_tuple ? PyTuple_New(count) : PyList_New(count);
    for (Py_ssize_t i = 0; made != NULL && i < count; i++) {
        PyObject *part = part_of(PyTuple_GET_ITEM(self->parts, i), values);
        if (part == NULL)
            Py_CLEAR(made);
        else if (is_tuple)
            PyTuple_SET_ITEM(made, i, part);
        else
            PyList_SET_ITEM(made, i, part);
    }
    Py_XDECREF(values);
    if (made == NULL || is_tuple)
        return made;
    PyObject *result = PyObject_CallOneArg(self->close, made);
    Py_DECREF(made);
    return result;
}

static PyObject *filler_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *parts, *close = Py_None;
    static char *names[] = {"parts", "close", NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!|O", names, &PyTuple_Type, &parts, &close))
        return NULL;
    OutputFiller *self = (OutputFiller *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->vectorcall = filler_call;
    self->parts = Py_NewRef(parts);
    self->close = Py_NewRef(close);
    return (PyObject *)self;
}

static int filler_traverse(PyObject *object, visitproc visit, void *arg)
{
    Py_VISIT(((OutputFiller *)object)->parts);
    Py_VISIT(((OutputFiller *)object)->close);
    return 0;
}

static void filler_dealloc(PyObject *object)
{
    PyObject_GC_UnTrack(object);
    Py_XDECREF(((OutputFiller *)object)->parts);
    Py_XDECREF(((OutputFiller *)object)->close);
    Py_TYPE(object)->tp_free(object);
}

static PyTypeObject OutputFillerType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "capture.native._native.OutputFiller",
    .tp_doc = "Makes a container of a call's values: of each part the value with this number, or what it makes of all.",
    .tp_basicsize = sizeof(OutputFiller),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(OutputFiller, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_new = filler_new,
    .tp_traverse = filler_traverse,
    .tp_dealloc = filler_dealloc,
};

int add_output_filler(PyObject *module)
{
    if (PyType_Ready(&OutputFillerType) < 0)
        return -1;
    return PyModule_AddObjectRef(module, "OutputFiller", (PyObject *)&OutputFillerType);
}
