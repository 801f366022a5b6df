/* Versions of dicts: a number that no two states of any dict share, so that an equal number means that nothing was written.

   Up to Python 3.11 each dict keeps one. From 3.12 on Python tells a watcher of each change to the dicts that it asked
   for, and the number is kept here, for as long as somebody needs it. So several dicts can have one number, too: whether
   any of a thousand was written to is one comparison. Watchers are few, eight in a process, and others
   use some: where none is left, or where Python does not tell every change, there are no versions, and what is in a dict
   is compared. 3.13.0 does not tell changes of a ``__dict__`` whose values lie in its object. So it is tried out at import
   (``dict_watchers.py``) what is told, of such dicts and of all others. What is told has not happened yet, but nobody looks
   in between: no Python code runs there. */
#include "native.h"

#if PY_VERSION_HEX < 0x030C0000

Version *version_of_dict(PyObject *dict)
{
    return (Version *)dict;
}

Version *version_of_dicts(PyObject *dicts)
{
    (void)dicts;
    return NULL;
}

void version_done(Version *version)
{
    (void)version;
}

int add_dict_versions(PyObject *module)
{
    (void)module;
    return 0;
}

#else

static int watcher = -1, tells_plain, tells_split;
static uint64_t latest = 1;
/* A hash table by address of the dict, or of the tuple of several: open, with places that are never empty again until it grows. */
static Version **table;
static size_t room, filled;
static Version gone;

static size_t place_of(PyObject *of)
{
    size_t at = (((size_t)of >> 4) * 0x9E3779B97F4A7C15ull) & (room - 1);
    while (table[at] != NULL && (table[at] == &gone || table[at]->of != of))
        at = (at + 1) & (room - 1);
    return at;
}

/* Makes the table twice as large: 0; -1 where there is no memory. */
static int grow(void)
{
    size_t old = room, kept = 0;
    Version **before = table;
    for (size_t i = 0; i < old; i++)
        kept += before[i] != NULL && before[i] != &gone;
    size_t wanted = 256;
    while (wanted < kept * 4)
        wanted *= 2;
    Version **grown = PyMem_Calloc(wanted, sizeof(*grown));
    if (grown == NULL)
        return -1;
    table = grown;
    room = wanted;
    filled = kept;
    for (size_t i = 0; i < old; i++)
        if (before[i] != NULL && before[i] != &gone)
            table[place_of(before[i]->of)] = before[i];
    PyMem_Free(before);
    return 0;
}

static void forget(Version *version)
{
    table[place_of(version->of)] = &gone;
    version->of = NULL;
    version->number = 0;
}

/* The watcher: Python calls it right before each change of a dict that is watched. */
static int dict_changed(PyDict_WatchEvent event, PyObject *dict, PyObject *Py_UNUSED(key), PyObject *Py_UNUSED(value))
{
    Version *found = room ? table[place_of(dict)] : NULL;
    for (Py_ssize_t i = 0; found != NULL && i < found->num_groups; i++)
        found->groups[i]->number = latest + 1;
    latest++;
    if (found != NULL && event == PyDict_EVENT_DEALLOCATED)
        forget(found);
    else if (found != NULL)
        found->number = latest;
    return 0;
}

static int is_split(PyObject *dict)
{
    return ((PyDictObject *)dict)->ma_values != NULL;
}

/* What is known of an object, with one more user; NULL without an exception: nothing, ``*at`` is its place then, or no memory. */
static Version *known_of(PyObject *of, size_t *at)
{
    if (filled * 2 >= room && grow() < 0)
        return NULL;
    *at = place_of(of);
    if (table[*at] != NULL)
        table[*at]->users++;
    return table[*at];
}

static Version *made_for(PyObject *of, size_t at)
{
    Version *made = PyMem_Malloc(sizeof(*made));
    if (made == NULL)
        return NULL;
    *made = (Version){.number = ++latest, .of = of, .users = 1};
    table[at] = made;
    filled++;
    return made;
}

/* The version of a dict, to be given back; NULL where it has none, without an exception. */
Version *version_of_dict(PyObject *dict)
{
    size_t at = room;
    if (watcher < 0 || !PyDict_Check(dict) || !(is_split(dict) ? tells_split : tells_plain))
        return NULL;
    Version *known = known_of(dict, &at);
    if (known != NULL || at >= room)
        return known;
    if (PyDict_Watch(watcher, dict) < 0) {
        PyErr_Clear();
        return NULL;
    }
    return made_for(dict, at);
}

/* A change to the dict is one to the group, too: 0, -1. */
static int join(Version *dict, Version *group)
{
    Version **groups = PyMem_Realloc(dict->groups, (size_t)(dict->num_groups + 1) * sizeof(*groups));
    if (groups == NULL)
        return -1;
    dict->groups = groups;
    groups[dict->num_groups++] = group;
    return 0;
}

static void part(Version *dict, const Version *group)
{
    for (Py_ssize_t i = dict->num_groups - 1; i >= 0; i--)
        if (dict->groups[i] == group) {
            dict->groups[i] = dict->groups[--dict->num_groups];
            return;
        }
}

/* The dicts in a tuple give back what they have of a group, the first ``count`` of them. */
static void disband(Version *group, PyObject *dicts, Py_ssize_t count)
{
    for (Py_ssize_t i = 0; i < count; i++) {
        Version *dict = table[place_of(PyTuple_GET_ITEM(dicts, i))];
        part(dict, group);
        version_done(dict);
    }
}

/* One version of all dicts in a tuple, to be given back before the tuple dies; NULL where one has none. */
Version *version_of_dicts(PyObject *dicts)
{
    size_t at = room;
    if (watcher < 0)
        return NULL;
    Version *group = known_of(dicts, &at);
    if (group != NULL || at >= room || (group = made_for(dicts, at)) == NULL)
        return group;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(dicts); i++) {
        Version *dict = version_of_dict(PyTuple_GET_ITEM(dicts, i));
        if (dict != NULL && join(dict, group) == 0)
            continue;
        version_done(dict);
        disband(group, dicts, i);
        forget(group);
        PyMem_Free(group);
        return NULL;
    }
    return group;
}

void version_done(Version *version)
{
    if (version == NULL || --version->users)
        return;
    PyObject *of = version->of;
    if (of != NULL && PyTuple_CheckExact(of))
        disband(version, of, PyTuple_GET_SIZE(of));
    else if (of != NULL && PyDict_Unwatch(watcher, of) < 0)
        PyErr_Clear();
    if (of != NULL)
        forget(version);
    PyMem_Free(version->groups);
    PyMem_Free(version);
}

/* The dict, or that of a class, is watched while a function changes it: whether that was told. */
static PyObject *is_told(PyObject *module, PyObject *args)
{
    PyObject *holder, *change;
    (void)module;
    if (!PyArg_ParseTuple(args, "OO", &holder, &change))
        return NULL;
    PyObject *dict = PyType_Check(holder) ? ((PyTypeObject *)holder)->tp_dict : holder;
    int plain = tells_plain, split = tells_split;
    tells_plain = tells_split = 1;
    Version *version = version_of_dict(dict);
    tells_plain = plain;
    tells_split = split;
    if (version == NULL)
        Py_RETURN_FALSE;
    uint64_t number = version->number;
    PyObject *done = PyObject_CallNoArgs(change);
    int told = version->number != number;
    version_done(version);
    if (done == NULL)
        return NULL;
    Py_DECREF(done);
    return PyBool_FromLong(told);
}

static PyObject *has_values_apart(PyObject *module, PyObject *dict)
{
    (void)module;
    return PyBool_FromLong(PyDict_Check(dict) && is_split(dict));
}

static PyObject *trust(PyObject *module, PyObject *args)
{
    (void)module;
    if (!PyArg_ParseTuple(args, "pp", &tells_plain, &tells_split))
        return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"dict_change_is_told", is_told, METH_VARARGS, "Whether Python tells what a function does to a dict, or a class."},
    {"is_split_dict", has_values_apart, METH_O, "The values lie apart from the keys, in an object."},
    {"trust_dict_watchers", trust, METH_VARARGS, "All changes are told of dicts, and of those with values in an object."},
    {NULL, NULL, 0, NULL},
};

int add_dict_versions(PyObject *module)
{
    watcher = PyDict_AddWatcher(dict_changed);
    if (watcher < 0)
        PyErr_Clear(); /* all eight watchers are in use */
    return PyModule_AddFunctions(module, functions);
}

#endif
