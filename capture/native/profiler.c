/* A range in a profiler's trace around each replay. While no profiler runs, this is one look at the
   version of a dict. */
#include "native.h"

#define NAMES(X) X(range_name) X(__enter__) X(__exit__)
NAMES(DECLARE)

static Version *version; /* of the dict; NULL where it has none */
static uint64_t quiet;   /* the version at which no profiler ran; 0: none */
static PyObject *names, *flag, *make; /* a module's dict, the name there that says whether a profiler runs, range(name) */

int range_begin(PyObject *function, PyObject **range)
{
    *range = NULL;
    uint64_t now = version == NULL ? 0 : NUMBER_OF(version);
    if (make == NULL || (now != 0 && now == quiet))
        return 0;
    if (PyDict_GetItemWithError(names, flag) != Py_True) {
        quiet = PyErr_Occurred() ? 0 : now;
        return drop_error();
    }
    PyObject *name = PyObject_GetAttr(function, s_range_name);
    PyObject *made = name == NULL ? NULL : PyObject_CallOneArg(make, name);
    PyObject *entered = made == NULL ? NULL : PyObject_CallMethodNoArgs(made, s___enter__);
    if (entered != NULL)
        *range = Py_NewRef(made);
    Py_XDECREF(entered);
    Py_XDECREF(made);
    Py_XDECREF(name);
    return drop_error();
}

void range_end(PyObject *range, PyObject **result)
{
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    PyObject *args[] = {range, Py_None, Py_None, Py_None};
    Py_XDECREF(PyObject_VectorcallMethod(s___exit__, args, 4, NULL));
    if (drop_error() < 0)
        Py_CLEAR(*result); /* the replay has happened: an interrupt comes out after it */
    if (type != NULL)
        PyErr_Restore(type, error, traceback);
    Py_DECREF(range);
}

static PyObject *use_profiler(PyObject *module, PyObject *args)
{
    PyObject *new_names, *new_flag, *new_make;
    (void)module;
    if (!PyArg_ParseTuple(args, "O!UO", &PyDict_Type, &new_names, &new_flag, &new_make))
        return NULL;
    version_done(version);
    version = version_of_dict(new_names);
    quiet = 0;
    Py_XSETREF(names, Py_NewRef(new_names));
    Py_XSETREF(flag, Py_NewRef(new_flag));
    Py_XSETREF(make, Py_NewRef(new_make));
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"use_profiler", use_profiler, METH_VARARGS,
     "A dict, a name in it that is True while a profiler runs, and what makes a range of a name."},
    {NULL, NULL, 0, NULL},
};

int add_profiler(PyObject *module)
{
    NAMES(INTERN)
    return PyModule_AddFunctions(module, methods);
}
