/* What several files ask of Python objects. */
#include "native.h"

#define NAMES(X) X(data_ptr)
NAMES(DECLARE)

long long number_of(PyObject *found)
{
    long long number = found == NULL ? -1 : PyLong_AsLongLong(found);
    Py_XDECREF(found);
    return number;
}

/* Whether a signal handler raised it, as a timeout does: 1, 0. Asked of errors alone, so Python may answer. Without an
   exception: as the interpreter ends, nobody can. */
static int is_interrupt(PyObject *error)
{
    PyObject *module = PyImport_ImportModule("capture.core.interrupts");
    PyObject *told = module == NULL ? NULL : PyObject_CallMethod(module, "is_interrupt", "O", error);
    Py_XDECREF(module);
    int is_one = truth_of(told) > 0;
    PyErr_Clear();
    return is_one;
}

int drop_error(void)
{
    if (!PyErr_Occurred())
        return 0;
    if (!PyErr_ExceptionMatches(PyExc_Exception))
        return -1;
    PyObject *error = taken_error();
    int stops = is_interrupt(error);
    if (stops)
        raise_again(error);
    Py_DECREF(error);
    return -stops;
}

static int raise_put_off(void *error)
{
    raise_again(error);
    Py_DECREF((PyObject *)error);
    return -1;
}

static int in_main_thread(void)
{
    PyObject *module = PyImport_ImportModule("threading");
    PyObject *thread = module == NULL ? NULL : PyObject_CallMethod(module, "main_thread", NULL);
    PyObject *ident = thread == NULL ? NULL : PyObject_GetAttrString(thread, "ident");
    int is_main = ident != NULL && PyLong_AsUnsignedLong(ident) == PyThread_get_thread_ident();
    Py_XDECREF(ident);
    Py_XDECREF(thread);
    Py_XDECREF(module);
    PyErr_Clear();
    return is_main;
}

void put_off_error(void)
{
    if (drop_error() == 0)
        return;
    PyObject *error = taken_error();
    if (!in_main_thread() || Py_AddPendingCall(raise_put_off, error) < 0)
        Py_DECREF(error); /* it is another thread's; or very many wait already, and the first is raised */
}

PyObject *left_to_python(PyObject *miss)
{
    return drop_error() < 0 ? NULL : Py_NewRef(miss);
}

int truth_of(PyObject *result)
{
    if (result == NULL)
        return -1;
    int truth = PyObject_IsTrue(result);
    Py_DECREF(result);
    return truth;
}

Caller caller_of(PyObject *function, PyObject *arguments)
{
    Caller caller = {Py_NewRef(function), Py_NewRef(arguments), NULL, NULL, NULL, NULL};
    if (!PyCFunction_CheckExact(function))
        return caller;
    Py_ssize_t count = PyTuple_GET_SIZE(arguments);
    PyCFunction found = PyCFunction_GET_FUNCTION(function);
    switch (PyCFunction_GET_FLAGS(function) & ~METH_STATIC) {
    case METH_NOARGS:
        caller.direct = count == 0 ? found : NULL;
        break;
    case METH_O:
        caller.direct = count == 1 ? found : NULL;
        caller.given = count == 1 ? PyTuple_GET_ITEM(arguments, 0) : NULL;
        break;
    case METH_VARARGS:
        caller.direct = found;
        caller.given = arguments;
        break;
    case METH_VARARGS | METH_KEYWORDS:
        caller.with_names = (PyCFunctionWithKeywords)(void (*)(void))found;
        break;
    case METH_FASTCALL:
        caller.fast = (FastFunction)(void (*)(void))found;
        break;
    }
    return caller;
}

PyObject *call_again(const Caller *caller)
{
    if (caller->direct != NULL)
        return caller->direct(PyCFunction_GET_SELF(caller->function), caller->given);
    if (caller->with_names != NULL)
        return caller->with_names(PyCFunction_GET_SELF(caller->function), caller->arguments, NULL);
    PyObject *const *items = ((PyTupleObject *)caller->arguments)->ob_item;
    if (caller->fast != NULL)
        return caller->fast(PyCFunction_GET_SELF(caller->function), items, PyTuple_GET_SIZE(caller->arguments));
    return PyObject_Vectorcall(caller->function, items, PyTuple_GET_SIZE(caller->arguments), NULL);
}

void forget_caller(Caller *caller)
{
    Py_CLEAR(caller->function);
    Py_CLEAR(caller->arguments);
}

PyObject *list_of(PyObject *const *items, Py_ssize_t count)
{
    PyObject *list = PyList_New(count);
    for (Py_ssize_t i = 0; list != NULL && i < count; i++)
        PyList_SET_ITEM(list, i, Py_NewRef(items[i]));
    return list;
}

int address_of(PyObject *tensor, uint64_t *address)
{
    PyObject *found = PyObject_CallMethodNoArgs(tensor, s_data_ptr);
    if (found == NULL)
        return -1;
    *address = PyLong_AsUnsignedLongLong(found);
    Py_DECREF(found);
    return *address == (uint64_t)-1 && PyErr_Occurred() ? -1 : 0;
}

/* ``sys._current_frames`` holds a lock of Python's while it makes objects. Up to Python 3.11 that may collect garbage, and
   what ends then may let another thread run, which waits for that lock for ever if it asks the same. Nothing lets another
   thread run here while the collector rests, so none sees that it does. */
static PyObject *current_frames(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    PyObject *function = Py_XNewRef(PySys_GetObject("_current_frames"));
    if (function == NULL)
        return PyErr_Format(PyExc_AttributeError, "sys._current_frames");
    int was_on = PyGC_Disable();
    PyObject *frames = PyObject_CallNoArgs(function);
    if (was_on)
        PyGC_Enable();
    Py_DECREF(function);
    return frames;
}

/* The dict of a class in which names may be put without the class; NULL where ``setattr`` does more than that. */
static PyObject *plain_dict_of(PyObject *holder)
{
    if (!PyType_Check(holder) || Py_TYPE(holder)->tp_setattro != PyType_Type.tp_setattro)
        return NULL;
    unsigned long flags = PyType_GetFlags((PyTypeObject *)holder);
    if (!(flags & Py_TPFLAGS_HEAPTYPE) || (flags & Py_TPFLAGS_IMMUTABLETYPE))
        return NULL;
#if PY_VERSION_HEX >= 0x030C0000
    return PyType_GetDict((PyTypeObject *)holder);
#else
    return Py_XNewRef(((PyTypeObject *)holder)->tp_dict);
#endif
}

/* Sets an attribute, or removes it (NULL): 0, -1. ``own``: as ``plain_dict_of``. Names such as ``__repr__`` are in slots
   of the class, too. */
static int put_attribute(PyObject *holder, PyObject *own, PyObject *name, PyObject *value)
{
    int is_special = PyUnicode_GET_LENGTH(name) > 1 && PyUnicode_READ_CHAR(name, 0) == '_' &&
                     PyUnicode_READ_CHAR(name, 1) == '_';
    if (own == NULL || is_special) {
        if (value != NULL)
            return PyObject_SetAttr(holder, name, value);
        PyObject *there = PyObject_GetAttrString(holder, "__dict__");
        int found = there == NULL ? -1 : PySequence_Contains(there, name);
        Py_XDECREF(there);
        return found <= 0 ? found : PyObject_DelAttr(holder, name);
    }
    PyObject *key = Py_NewRef(name);
    PyUnicode_InternInPlace(&key);
    int failed = value != NULL ? PyDict_SetItem(own, key, value) : PyDict_Contains(own, key);
    if (value == NULL && failed > 0)
        failed = PyDict_DelItem(own, key);
    Py_DECREF(key);
    return failed;
}

/* ``setattr`` tells the class each time, which drops what Python has cached of it: 1 us. Here it is told once. */
static PyObject *put_attributes(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *holder, *others, *absent, *name, *value;
    if (!PyArg_ParseTuple(args, "OO!O", &holder, &PyDict_Type, &others, &absent))
        return NULL;
    PyObject *own = plain_dict_of(holder);
    Py_ssize_t at = 0;
    int failed = 0;
    while (!failed && PyDict_Next(others, &at, &name, &value)) {
        if (!PyUnicode_Check(name)) {
            PyErr_SetString(PyExc_TypeError, "an attribute has no name");
            failed = 1;
        } else
            failed = put_attribute(holder, own, name, value == absent ? NULL : value) < 0;
    }
    if (own != NULL)
        PyType_Modified((PyTypeObject *)holder);
    Py_XDECREF(own);
    return failed ? NULL : Py_NewRef(Py_None);
}

static PyMethodDef functions[] = {
    {"put_attributes", put_attributes, METH_VARARGS,
     "Sets attributes of a class or module, by name, and removes those whose value is the last argument."},
    {"current_frames", current_frames, METH_NOARGS, "The frame of each thread by its number, as ``sys._current_frames``."},
    {NULL, NULL, 0, NULL},
};

int add_util(PyObject *module)
{
    NAMES(INTERN)
    return PyModule_AddFunctions(module, functions);
}
