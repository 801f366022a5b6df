/* What torch calls for each operator of a thread whose watch is on.

   The watch sees operators at a dispatch key (``torch_private/operator_watch.py``). As long as it looks at one, what it
   calls must not come back to it, so the key is left out of this thread, and put back whatever ends the look: a signal
   handler may raise between any two steps of Python, and all that follows would be missed. */
#include "native.h"

#include <structmember.h>

typedef struct {
    PyObject_HEAD
    PyObject *leave_out; /* a function of torch: a key, and whether this thread leaves it out */
    PyObject *key;
    PyObject *see; /* a function: the operator, its arguments as a tuple, those by name as a dict */
} OperatorHook;

static int set_left_out(OperatorHook *self, PyObject *is_left_out)
{
    PyObject *done = PyObject_CallFunctionObjArgs(self->leave_out, self->key, is_left_out, NULL);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

static PyObject *hook_call(PyObject *object, PyObject *args, PyObject *kwargs)
{
    OperatorHook *self = (OperatorHook *)object;
    Py_ssize_t num = PyTuple_GET_SIZE(args);
    if (num < 1) {
        PyErr_SetString(PyExc_TypeError, "an operator is expected");
        return NULL;
    }
    PyObject *rest = PyTuple_GetSlice(args, 1, num), *named = kwargs == NULL ? PyDict_New() : Py_NewRef(kwargs);
    PyObject *result = NULL;
    if (rest != NULL && named != NULL && set_left_out(self, Py_True) == 0) {
        result = PyObject_CallFunctionObjArgs(self->see, PyTuple_GET_ITEM(args, 0), rest, named, NULL);
        PyObject *error = result == NULL ? taken_error() : NULL;
        if (set_left_out(self, Py_False) < 0)
            Py_CLEAR(result);
        else if (error != NULL)
            raise_again(error);
        Py_XDECREF(error);
    }
    Py_XDECREF(rest);
    Py_XDECREF(named);
    return result;
}

static int hook_traverse(PyObject *object, visitproc visit, void *arg)
{
    OperatorHook *self = (OperatorHook *)object;
    Py_VISIT(self->leave_out);
    Py_VISIT(self->key);
    Py_VISIT(self->see);
    return 0;
}

static int hook_clear(PyObject *object)
{
    OperatorHook *self = (OperatorHook *)object;
    Py_CLEAR(self->leave_out);
    Py_CLEAR(self->key);
    Py_CLEAR(self->see);
    return 0;
}

static void hook_dealloc(PyObject *object)
{
    PyObject_GC_UnTrack(object);
    hook_clear(object);
    Py_TYPE(object)->tp_free(object);
}

static PyObject *hook_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"leave_out", "key", "see", NULL};
    PyObject *leave_out, *key, *see;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOO", names, &leave_out, &key, &see))
        return NULL;
    OperatorHook *self = (OperatorHook *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->leave_out = Py_NewRef(leave_out);
    self->key = Py_NewRef(key);
    self->see = Py_NewRef(see);
    return (PyObject *)self;
}

static PyTypeObject OperatorHookType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "capture.native._native.OperatorHook",
    .tp_doc = "Hands operators to a watch, which does not see those that it calls.",
    .tp_basicsize = sizeof(OperatorHook),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_call = hook_call,
    .tp_new = hook_new,
    .tp_dealloc = hook_dealloc,
    .tp_traverse = hook_traverse,
    .tp_clear = hook_clear,
};

int add_operator_hook(PyObject *module)
{
    if (PyType_Ready(&OperatorHookType) < 0)
        return -1;
    return PyModule_AddObjectRef(module, "OperatorHook", (PyObject *)&OperatorHookType);
}
