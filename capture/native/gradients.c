/* Gradients: those of the last replay, which may stay where they are if nobody else has got hold of them. */
#include "native.h"

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

static PyMethodDef functions[] = {
    {"gradient_counts", gradient_counts, METH_VARARGS, "Uses and references of a gradient, as ``are_untouched`` sees."},
    {"are_untouched", are_untouched, METH_VARARGS, "``_liveness.are_untouched_gradients``."},
    {NULL, NULL, 0, NULL},
};

int add_gradients(PyObject *module)
{
    NAMES(INTERN)
    return PyModule_AddFunctions(module, functions);
}
