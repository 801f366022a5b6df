/* Modes: functions of no interest but for what they give. They hold while every one gives what it gave. */
#include "native.h"

typedef struct {
    PyObject *function;
    PyObject *arguments; /* a tuple */
    PyObject *expected;
} Term;

typedef struct {
    PyObject_HEAD
    unsigned long thread;
    Py_ssize_t count;
    Term *terms;
    vectorcallfunc vectorcall;
} Modes;

static PyTypeObject ModesType;

int is_modes(PyObject *one)
{
    return Py_TYPE(one) == &ModesType;
}

static int is_as_expected(PyObject *found, PyObject *expected)
{
    if (found == expected)
        return 1;
    /* Only what is compared by value in any case: other objects are themselves or others. */
    if (Py_TYPE(found) != Py_TYPE(expected) || !(PyUnicode_CheckExact(found) || PyLong_CheckExact(found)))
        return 0;
    return PyObject_RichCompareBool(found, expected, Py_EQ);
}

int modes_hold(PyObject *object)
{
    Modes *self = (Modes *)object;
    if (self->thread != PyThread_get_thread_ident())
        return 0;
    for (Py_ssize_t i = 0; i < self->count; i++) {
        Term *term = &self->terms[i];
        PyObject *found = PyObject_Vectorcall(
            term->function, ((PyTupleObject *)term->arguments)->ob_item, PyTuple_GET_SIZE(term->arguments), NULL);
        if (found == NULL)
            return -1;
        int same = is_as_expected(found, term->expected);
        Py_DECREF(found);
        if (same <= 0)
            return same;
    }
    return 1;
}

static PyObject *modes_call(PyObject *self, PyObject *const *args, size_t nargsf, PyObject *names)
{
    if (PyVectorcall_NARGS(nargsf) || names != NULL) {
        PyErr_SetString(PyExc_TypeError, "modes take no arguments");
        return NULL;
    }
    int holds = modes_hold(self);
    return holds < 0 ? NULL : PyBool_FromLong(holds);
}

static int modes_traverse(PyObject *object, visitproc visit, void *arg)
{
    Modes *self = (Modes *)object;
    for (Py_ssize_t i = 0; i < self->count; i++) {
        Py_VISIT(self->terms[i].function);
        Py_VISIT(self->terms[i].arguments);
        Py_VISIT(self->terms[i].expected);
    }
    return 0;
}

static int modes_clear(PyObject *object)
{
    Modes *self = (Modes *)object;
    Py_ssize_t count = self->count;
    Term *terms = self->terms;
    self->count = 0;
    self->terms = NULL;
    for (Py_ssize_t i = 0; i < count; i++) {
        Py_DECREF(terms[i].function);
        Py_DECREF(terms[i].arguments);
        Py_DECREF(terms[i].expected);
    }
    PyMem_Free(terms);
    return 0;
}

static void modes_dealloc(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    modes_clear(self);
    Py_TYPE(self)->tp_free(self);
}

static PyObject *modes_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *given;
    static char *names[] = {"terms", NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!", names, &PyTuple_Type, &given))
        return NULL;
    Modes *self = (Modes *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->vectorcall = modes_call;
    self->thread = PyThread_get_thread_ident();
    self->terms = PyMem_New(Term, PyTuple_GET_SIZE(given) + 1);
    if (self->terms == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(given); i++) {
        PyObject *function, *arguments, *expected;
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(given, i), "OO!O", &function, &PyTuple_Type, &arguments, &expected)) {
            Py_DECREF(self);
            return NULL;
        }
        self->terms[i] = (Term){Py_NewRef(function), Py_NewRef(arguments), Py_NewRef(expected)};
        self->count = i + 1;
    }
    return (PyObject *)self;
}

static PyTypeObject ModesType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "capture._native.Modes",
    .tp_doc = "Tells whether functions still give in this thread what they gave.",
    .tp_basicsize = sizeof(Modes),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(Modes, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_new = modes_new,
    .tp_dealloc = modes_dealloc,
    .tp_traverse = modes_traverse,
    .tp_clear = modes_clear,
};

int add_modes(PyObject *module)
{
    return PyType_Ready(&ModesType) < 0 ? -1 : PyModule_AddObjectRef(module, "Modes", (PyObject *)&ModesType);
}
