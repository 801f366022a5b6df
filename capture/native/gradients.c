/* Gradients: those of the last replay, which may stay where they are if nobody else has got hold of them. */
#include "native.h"

#include <string.h>

#define NAMES(X) X(grad) X(untyped_storage) X(_cdata) X(storage) X(alone) X(address) X(__dict__)
NAMES(DECLARE)

/* The gradient lies on the source's storage, which nobody else uses. */
static int is_alone(PyObject *gradient, PyObject *source, PyObject *count)
{
    PyObject *storage = PyObject_CallMethodNoArgs(gradient, s_untyped_storage);
    PyObject *known = storage == NULL ? NULL : PyObject_GetAttr(source, s_storage);
    int alone = known == NULL ? -1 : known == storage;
    if (alone > 0) {
        PyObject *address = PyObject_GetAttr(storage, s__cdata);
        long long holders = address == NULL ? -1 : number_of(PyObject_CallOneArg(count, address));
        long long others = holders < 0 ? -1 : number_of(PyObject_GetAttr(source, s_alone));
        alone = others < 0 ? -1 : holders <= others + 1;
        Py_XDECREF(address);
    }
    Py_XDECREF(known);
    Py_XDECREF(storage);
    return alone;
}

/* Nobody hung anything on the gradient, and it is where the source made it. */
static int is_as_made(PyObject *gradient, PyObject *source)
{
    uint64_t address = 0;
    PyObject *known = PyObject_GetAttr(source, s_address);
    int same = known == NULL || address_of(gradient, &address) < 0 ? -1 : PyLong_AsUnsignedLongLong(known) == address;
    Py_XDECREF(known);
    if (same <= 0)
        return PyErr_Occurred() ? -1 : same;
    PyObject *own = PyObject_GetAttr(gradient, s___dict__);
    int plain = own == NULL ? -1 : !PyDict_Check(own) ? 0 : PyDict_GET_SIZE(own) == 0;
    Py_XDECREF(own);
    return plain;
}

static PyObject *gradient_counts(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *parameter, *uses;
    if (!PyArg_ParseTuple(args, "OO", &parameter, &uses))
        return NULL;
    PyObject *gradient = PyObject_GetAttr(parameter, s_grad);
    PyObject *found = gradient == NULL ? NULL : PyObject_CallOneArg(uses, gradient);
    PyObject *result = found == NULL ? NULL : Py_BuildValue("On", found, Py_REFCNT(gradient));
    Py_XDECREF(found);
    Py_XDECREF(gradient);
    return result;
}

static int is_untouched(
    PyObject *gradient, PyObject *source, PyObject *count, PyObject *uses, long long used, Py_ssize_t references)
{
    if (gradient == Py_None || Py_REFCNT(gradient) != references)
        return 0;
    long long number = number_of(PyObject_CallOneArg(uses, gradient));
    int same = number < 0 ? -1 : number == used;
    if (same > 0)
        same = is_alone(gradient, source, count);
    return same > 0 ? is_as_made(gradient, source) : same;
}

static PyObject *are_untouched(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *parameters, *sources, *count, *uses, *fresh;
    long long used;
    Py_ssize_t references;
    if (!PyArg_ParseTuple(
            args, "O!O!OOO(Ln)", &PyTuple_Type, &parameters, &PyTuple_Type, &sources, &count, &uses, &fresh, &used,
            &references))
        return NULL;
    Py_ssize_t number = PyTuple_GET_SIZE(parameters), taken = 0;
    PyObject **gradients = PyMem_New(PyObject *, number + 1);
    if (gradients == NULL)
        return PyErr_NoMemory();
    int same = number == PyTuple_GET_SIZE(sources);
    for (Py_ssize_t i = 0; same > 0 && i < number; i++) {
        PyObject *parameter = PyTuple_GET_ITEM(parameters, i);
        PyObject *gradient = parameter == Py_None ? Py_NewRef(Py_None) : PyObject_GetAttr(parameter, s_grad);
        if (gradient == NULL) {
            same = -1;
            break;
        }
        gradients[taken++] = gradient;
        same = is_untouched(gradient, PyTuple_GET_ITEM(sources, i), count, uses, used, references);
    }
    if (same > 0)
        same = truth_of(PyObject_Vectorcall(fresh, gradients, taken, NULL));
    while (taken)
        Py_DECREF(gradients[--taken]);
    PyMem_Free(gradients);
    return same < 0 ? NULL : PyBool_FromLong(same);
}

/* Gradients that were found untouched once, and are so as long as nothing that torch and Python count has moved. They
   are not kept alive: another object where one was is told by its storage, which the recording holds. */
typedef struct {
    PyObject_HEAD
    Layout layout;
    Py_ssize_t count;
    Seen *known;
    char *bytes; /* metadata of each */
    vectorcallfunc vectorcall;
} Untouched;

/* 1, 0, or -1 with an exception set. */
static int is_as_known(Untouched *self, Py_ssize_t i, PyObject *parameter)
{
    PyObject *gradient = parameter == Py_None ? Py_NewRef(Py_None) : PyObject_GetAttr(parameter, s_grad);
    if (gradient == NULL)
        return -1;
    int same = is_as_seen(&self->layout, gradient, &self->known[i], self->bytes + i * width_of(&self->layout));
    if (same) {
        PyObject *own = PyObject_GetAttr(gradient, s___dict__);
        same = own == NULL ? -1 : PyDict_Check(own) && PyDict_GET_SIZE(own) == 0;
        Py_XDECREF(own);
    }
    Py_DECREF(gradient);
    return same;
}

static PyObject *untouched_call(PyObject *object, PyObject *const *args, size_t nargsf, PyObject *names)
{
    Untouched *self = (Untouched *)object;
    if (PyVectorcall_NARGS(nargsf) != 1 || names != NULL || !PyTuple_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "it takes a tuple of parameters");
        return NULL;
    }
    int same = PyTuple_GET_SIZE(args[0]) == self->count;
    for (Py_ssize_t i = 0; same > 0 && i < self->count; i++)
        same = is_as_known(self, i, PyTuple_GET_ITEM(args[0], i));
    return same < 0 ? NULL : PyBool_FromLong(same);
}

static void untouched_dealloc(PyObject *object)
{
    Untouched *self = (Untouched *)object;
    PyMem_Free(self->known);
    PyMem_Free(self->bytes);
    Py_TYPE(object)->tp_free(object);
}

static PyObject *untouched_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"parameters", "layout", NULL};
    PyObject *parameters, *where;
    Layout layout = {0};
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "O!O!", names, &PyTuple_Type, &parameters, &PyTuple_Type, &where) ||
        layout_from(where, &layout) < 0)
        return NULL;
    Untouched *self = (Untouched *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    Py_ssize_t count = PyTuple_GET_SIZE(parameters), width = width_of(&layout);
    self->vectorcall = untouched_call;
    self->layout = layout;
    self->known = PyMem_New(Seen, count + 1);
    self->bytes = PyMem_New(char, count * width + 1);
    int failed = self->known == NULL || self->bytes == NULL;
    if (failed)
        PyErr_NoMemory();
    for (; !failed && self->count < count; self->count++) {
        PyObject *gradient = PyObject_GetAttr(PyTuple_GET_ITEM(parameters, self->count), s_grad);
        failed = gradient == NULL || !see(&layout, gradient, &self->known[self->count]);
        if (!failed)
            memcpy(self->bytes + self->count * width, self->known[self->count].impl + layout.begin, width);
        else if (gradient != NULL)
            PyErr_SetString(PyExc_ValueError, "there is no gradient");
        Py_XDECREF(gradient);
    }
    if (failed)
        Py_CLEAR(self);
    return (PyObject *)self;
}

static PyTypeObject UntouchedType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "capture._native.Untouched",
    .tp_doc = "Tells whether the gradients of parameters, given as a tuple, are as they were, and who has them, too.",
    .tp_basicsize = sizeof(Untouched),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(Untouched, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_new = untouched_new,
    .tp_dealloc = untouched_dealloc,
};

static PyMethodDef functions[] = {
    {"gradient_counts", gradient_counts, METH_VARARGS, "Uses and references of a gradient, as ``are_untouched`` sees."},
    {"are_untouched", are_untouched, METH_VARARGS, "``_liveness.are_untouched_gradients``."},
    {NULL, NULL, 0, NULL},
};

int add_gradients(PyObject *module)
{
    NAMES(INTERN)
    if (PyType_Ready(&UntouchedType) < 0 || PyModule_AddObjectRef(module, "Untouched", (PyObject *)&UntouchedType) < 0)
        return -1;
    return PyModule_AddFunctions(module, functions);
}
