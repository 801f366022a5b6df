/* Places: what modules hold, as ``state.source`` notes it before a run that is watched, and compares it afterwards. */
#include "native.h"

#define NAMES(X) X(parameter) X(buffer) X(module) X(attribute) X(_parameters) X(_buffers) X(_modules)
NAMES(DECLARE)
#define TABLES 4 /* behind a module: its attributes, parameters, buffers, submodules */

/* A dict, and the keys and the very objects that it holds. */
static PyObject *table_of(PyObject *now)
{
    if (!PyDict_Check(now)) {
        PyErr_SetString(PyExc_TypeError, "a module keeps its members in no dict");
        return NULL;
    }
    Py_ssize_t count = PyDict_GET_SIZE(now), at = 0, found = 0;
    PyObject *keys = PyTuple_New(count), *values = PyTuple_New(count), *key, *value;
    if (keys == NULL || values == NULL || PyDict_GET_SIZE(now) != count) { /* garbage was collected meanwhile */
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_RuntimeError, "a module changes while it is looked at");
        Py_XDECREF(keys);
        Py_XDECREF(values);
        return NULL;
    }
    while (PyDict_Next(now, &at, &key, &value)) {
        PyTuple_SET_ITEM(keys, found, Py_NewRef(key));
        PyTuple_SET_ITEM(values, found++, Py_NewRef(value));
    }
    return Py_BuildValue("(ONN)", now, keys, values);
}

static int is_number(PyObject *name)
{
    Py_ssize_t length = PyUnicode_GET_LENGTH(name);
    for (Py_ssize_t i = 0; i < length; i++)
        if (!Py_UNICODE_ISDIGIT(PyUnicode_READ_CHAR(name, i)))
            return 0;
    return length > 0;
}

/* ``state.source.Source(kind, holder, name, path, parent)``, which takes the path over; NULL with an exception set. */
static PyObject *place_of(PyObject *kind, PyObject *holder, PyObject *name, PyObject *path, PyObject *parent)
{
    PyObject *place = path == NULL ? NULL : slots.Source.type->tp_alloc(slots.Source.type, 0);
    if (place != NULL) {
        PUT(place, Source, kind, kind);
        PUT(place, Source, holder, holder);
        PUT(place, Source, name, name);
        PUT(place, Source, path, path);
        PUT(place, Source, parent, parent);
    }
    Py_XDECREF(path);
    return place;
}

/* Members that are found, and what they have in common. */
typedef struct {
    PyObject *found, *internals, *place, *path, *prefix;
} Members;

/* Appends one member: 0, -1. */
static int put_member(const Members *to, PyObject *kind, PyObject *holder, PyObject *name, PyObject *value)
{
    if (!PyUnicode_Check(name)) {
        PyErr_SetString(PyExc_TypeError, "a module's member has no name");
        return -1;
    }
    PyObject *path = kind != s_attribute && is_number(name) ? PyUnicode_FromFormat("%U[%U]", to->path, name)
                                                            : PyUnicode_Concat(to->prefix, name);
    PyObject *place = place_of(kind, holder, name, path, to->place);
    PyObject *one = place == NULL ? NULL : PyTuple_Pack(2, place, value);
    int failed = one == NULL || PyList_Append(to->found, one) < 0;
    Py_XDECREF(place);
    Py_XDECREF(one);
    return failed ? -1 : 0;
}

static int put_table(const Members *to, PyObject *kind, PyObject *holder, PyObject *table)
{
    PyObject *keys = PyTuple_GET_ITEM(table, 1), *values = PyTuple_GET_ITEM(table, 2);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(keys); i++) {
        PyObject *name = PyTuple_GET_ITEM(keys, i);
        int hidden = kind == s_attribute ? PySet_Contains(to->internals, name) : 0;
        if (hidden < 0 || (!hidden && put_member(to, kind, holder, name, PyTuple_GET_ITEM(values, i)) < 0))
            return -1;
    }
    return 0;
}

static PyObject *members_of_module(PyObject *self, PyObject *args, PyObject *kwargs)
{
    (void)self;
    static char *names[] = {"module", "place", "internals", NULL};
    PyObject *module, *dicts[TABLES] = {NULL};
    Members to = {0};
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "OO$O!", names, &module, &to.place, &PyFrozenSet_Type, &to.internals) ||
        !is_of(to.place, slots.Source.type) || (to.path = SLOT(to.place, Source, path)) == NULL)
        return NULL;
    to.found = PyList_New(0);
    to.prefix = PyUnicode_FromFormat("%U.", to.path);
    PyObject *tables = PyTuple_New(TABLES);
    PyObject *const attributes[TABLES] = {NULL, s__parameters, s__buffers, s__modules};
    int failed = to.found == NULL || to.prefix == NULL || tables == NULL;
    for (int i = 0; i < TABLES && !failed; i++) {
        dicts[i] = i ? PyObject_GetAttr(module, attributes[i]) : PyObject_GenericGetDict(module, NULL);
        PyObject *table = dicts[i] == NULL ? NULL : table_of(dicts[i]);
        failed = table == NULL;
        if (!failed)
            PyTuple_SET_ITEM(tables, i, table);
    }
    PyObject *const kinds[TABLES] = {s_attribute, s_parameter, s_buffer, s_module};
    for (int i = 1; i <= TABLES && !failed; i++) { /* attributes last */
        int at = i % TABLES;
        failed = put_table(&to, kinds[at], at ? dicts[at] : module, PyTuple_GET_ITEM(tables, at)) < 0;
    }
    for (int i = 0; i < TABLES; i++)
        Py_XDECREF(dicts[i]);
    Py_XDECREF(to.prefix);
    PyObject *both = failed ? NULL : PyTuple_Pack(2, to.found, tables);
    Py_XDECREF(to.found);
    Py_XDECREF(tables);
    return both;
}

/* The dict has the keys and the very objects that the table notes: 1, 0, -1. */
static int is_as_it_was(PyObject *table)
{
    PyObject *now, *keys, *values, *key, *value;
    if (!PyArg_ParseTuple(table, "O!O!O!", &PyDict_Type, &now, &PyTuple_Type, &keys, &PyTuple_Type, &values))
        return -1;
    Py_ssize_t count = PyTuple_GET_SIZE(keys), at = 0;
    if (PyDict_GET_SIZE(now) != count || PyTuple_GET_SIZE(values) != count)
        return 0;
    for (Py_ssize_t i = 0; PyDict_Next(now, &at, &key, &value); i++) {
        PyObject *was = PyTuple_GET_ITEM(keys, i);
        int texts = PyUnicode_CheckExact(key) && PyUnicode_CheckExact(was);
        int same = key == was || (texts && PyUnicode_Compare(key, was) == 0);
        if (!same || value != PyTuple_GET_ITEM(values, i))
            return 0;
    }
    return 1;
}

static PyObject *are_as_they_were(PyObject *self, PyObject *tables)
{
    (void)self;
    int same = PyTuple_Check(tables) ? 1 : -1;
    if (same < 0)
        PyErr_SetString(PyExc_TypeError, "this is no tuple of tables");
    for (Py_ssize_t i = 0; same > 0 && i < PyTuple_GET_SIZE(tables); i++)
        same = is_as_it_was(PyTuple_GET_ITEM(tables, i));
    return same < 0 ? NULL : PyBool_FromLong(same);
}

static PyMethodDef functions[] = {
    {"members_of_module", (PyCFunction)(void (*)(void))members_of_module, METH_VARARGS | METH_KEYWORDS,
     "Members with their places, and the dicts behind the module."},
    {"are_as_they_were", are_as_they_were, METH_O, "The same members, in the same order."},
    {NULL, NULL, 0, NULL},
};

int add_places(PyObject *module)
{
    NAMES(INTERN)
    return PyModule_AddFunctions(module, functions);
}
