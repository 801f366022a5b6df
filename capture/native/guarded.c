/* A call that is put right whatever ends it. A signal may raise between any two steps of Python, in a ``finally`` or the
   begin of a ``with`` as well as anywhere else: only C can be sure to get to what has to be done then. */
#include "native.h"

#define TRIES 64

/* The exception in flight, with its traceback: a new reference. */
static PyObject *taken_error(void)
{
#if PY_VERSION_HEX >= 0x030C0000
    return PyErr_GetRaisedException();
#else
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    if (traceback != NULL)
        PyException_SetTraceback(value, traceback);
    Py_XDECREF(type);
    Py_XDECREF(traceback);
    return value;
#endif
}

static void raise_again(PyObject *error)
{
    PyObject *traceback = PyException_GetTraceback(error);
    PyErr_Restore(Py_NewRef(Py_TYPE(error)), Py_NewRef(error), traceback);
}

/* ``mend(errors)`` is called until it ends well: with what ended the call, and what ended ``mend`` since. It gives the
   result in a tuple, or the error to be raised, or None for the first. */
static PyObject *guarded(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    if (count != 3 || !PyTuple_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "a function, its arguments and what puts things right");
        return NULL;
    }
    PyObject *result = PyObject_Call(args[0], args[1], NULL);
    if (result != NULL)
        return result;
    PyObject *error = taken_error(), *errors = PyList_New(1), *verdict = NULL;
    if (errors == NULL) {
        PyErr_Clear();
        raise_again(error);
        Py_DECREF(error);
        return NULL;
    }
    PyList_SET_ITEM(errors, 0, Py_NewRef(error));
    for (int i = 0; i < TRIES && verdict == NULL; i++) {
        verdict = PyObject_CallOneArg(args[2], errors);
        if (verdict == NULL) {
            PyObject *other = taken_error();
            if (PyList_Append(errors, other) < 0)
                PyErr_Clear();
            Py_DECREF(other);
        }
    }
    Py_DECREF(errors);
    if (verdict != NULL && PyTuple_Check(verdict) && PyTuple_GET_SIZE(verdict) == 1)
        result = Py_NewRef(PyTuple_GET_ITEM(verdict, 0));
    else
        raise_again(verdict != NULL && PyExceptionInstance_Check(verdict) ? verdict : error);
    Py_XDECREF(verdict);
    Py_DECREF(error);
    return result;
}

static PyMethodDef functions[] = {
    {"guarded", (PyCFunction)(void (*)(void))guarded, METH_FASTCALL,
     "guarded(run, arguments, mend): the call's result; whatever ends it, mend(errors) is called until it ends well."},
    {NULL, NULL, 0, NULL},
};

int add_guarded(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
