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

PyObject *left_to_python(PyObject *miss)
{
    if (!PyErr_ExceptionMatches(PyExc_Exception))
        return NULL;
    PyErr_Clear();
    return Py_NewRef(miss);
}

int truth_of(PyObject *result)
{
    if (result == NULL)
        return -1;
    int truth = PyObject_IsTrue(result);
    Py_DECREF(result);
    return truth;
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

int add_util(PyObject *module)
{
    (void)module;
    NAMES(INTERN)
    return 0;
}
