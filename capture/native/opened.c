/* Opened: the values in the containers of a call, in the order of its key.

   The expected form of a call has a node for each of its values: None for a value outside of containers,
   else ``(class, members, items, slots, attributes, is_object)``. ``members`` are the nodes of a tuple's or a list's
   members; the others are ``(names, nodes)``, of a dict by its keys in their order, of slots by their descriptors, of a
   ``__dict__`` by its names in their order; or None. The members of a weak reference are the number of the object that
   it refers to, among those that were met. Nothing of users' classes runs. */
#include "native.h"

enum { KIND, MEMBERS, ITEMS, SLOTS, ATTRIBUTES, IS_OBJECT, PARTS };

static int add(Flat *flat, PyObject *value)
{
    if (flat->count == MOST_VALUES)
        return 0;
    flat->values[flat->count++] = Py_NewRef(value);
    return 1;
}

/* An object that counts once: it is met for the first time. */
static int add_object(Flat *flat, PyObject *value)
{
    for (Py_ssize_t i = 0; i < flat->num_objects; i++)
        if (flat->objects[i] == value)
            return 0;
    if (flat->num_objects == MOST_OBJECTS)
        return 0;
    flat->objects[flat->num_objects++] = value;
    return 1;
}

static int open_one(PyObject *node, PyObject *value, Flat *flat);

static int open_members(PyObject *nodes, PyObject *value, Flat *flat)
{
    int is_list = PyList_Check(value), found = 1;
    Py_ssize_t count = PyTuple_GET_SIZE(nodes);
    if (!is_list && !PyTuple_Check(value))
        return 0;
    if ((is_list ? PyList_GET_SIZE(value) : PyTuple_GET_SIZE(value)) != count)
        return 0;
    for (Py_ssize_t i = 0; found > 0 && i < count; i++) {
        if (is_list && i >= PyList_GET_SIZE(value))
            return 0;
        PyObject *one = is_list ? PyList_GET_ITEM(value, i) : PyTuple_GET_ITEM(value, i);
        found = open_one(PyTuple_GET_ITEM(nodes, i), one, flat);
    }
    return found;
}

static int open_dict(PyObject *part, PyObject *dict, Flat *flat)
{
    PyObject *names = PyTuple_GET_ITEM(part, 0), *nodes = PyTuple_GET_ITEM(part, 1), *key, *one;
    Py_ssize_t count = PyTuple_GET_SIZE(names), at = 0, i = 0;
    if (!PyDict_Check(dict) || PyDict_GET_SIZE(dict) != count)
        return 0;
    for (; i < count && PyDict_Next(dict, &at, &key, &one); i++) {
        PyObject *name = PyTuple_GET_ITEM(names, i);
        int found = name == key ? 1 : same_value(name, key);
        if (found > 0)
            found = open_one(PyTuple_GET_ITEM(nodes, i), one, flat);
        if (found <= 0)
            return found;
    }
    return i == count;
}

static int open_slots(PyObject *part, PyObject *value, Flat *flat)
{
    PyObject *slots = PyTuple_GET_ITEM(part, 0), *nodes = PyTuple_GET_ITEM(part, 1);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(slots); i++) {
        PyObject *slot = PyTuple_GET_ITEM(slots, i), *node = PyTuple_GET_ITEM(nodes, i);
        PyObject *one = Py_TYPE(slot)->tp_descr_get(slot, value, (PyObject *)Py_TYPE(value));
        if (one == NULL) {
            if (!PyErr_ExceptionMatches(PyExc_AttributeError))
                return -1;
            PyErr_Clear();
        }
        int found = (one == NULL) == (node == Py_Ellipsis); /* not set, as it was */
        if (found && one != NULL)
            found = open_one(node, one, flat);
        Py_XDECREF(one);
        if (found <= 0)
            return found;
    }
    return 1;
}

static int open_attributes(PyObject *part, PyObject *value, Flat *flat)
{
    PyObject *own = PyObject_GenericGetDict(value, NULL);
    if (own == NULL)
        return -1;
    int found = own == value ? 0 : open_dict(part, own, flat);
    Py_DECREF(own);
    return found;
}

static int open_one(PyObject *node, PyObject *value, Flat *flat)
{
    if (node == Py_None)
        return add(flat, value);
    if ((PyObject *)Py_TYPE(value) != PyTuple_GET_ITEM(node, KIND))
        return 0;
    int found = PyTuple_GET_ITEM(node, IS_OBJECT) == Py_True ? add_object(flat, value) : 1;
    PyObject *part = PyTuple_GET_ITEM(node, MEMBERS);
    if (PyLong_CheckExact(part)) {
        Py_ssize_t number = PyLong_AsSsize_t(part);
        return number < flat->num_objects && referent_of(value) == flat->objects[number];
    }
    if (found > 0 && part != Py_None)
        found = open_members(part, value, flat);
    if (found > 0 && (part = PyTuple_GET_ITEM(node, ITEMS)) != Py_None)
        found = open_dict(part, value, flat);
    if (found > 0 && (part = PyTuple_GET_ITEM(node, SLOTS)) != Py_None)
        found = open_slots(part, value, flat);
    if (found > 0 && (part = PyTuple_GET_ITEM(node, ATTRIBUTES)) != Py_None)
        found = open_attributes(part, value, flat);
    return found;
}

int open_values(PyObject *nodes, PyObject *const *values, Flat *flat)
{
    int found = 1;
    flat->count = flat->num_objects = 0;
    for (Py_ssize_t i = 0; found > 0 && i < PyTuple_GET_SIZE(nodes); i++)
        found = open_one(PyTuple_GET_ITEM(nodes, i), values[i], flat);
    return found;
}

void close_values(Flat *flat)
{
    while (flat->count)
        Py_DECREF(flat->values[--flat->count]);
}

/* ``(names, nodes)``, as many of both, or None. */
static int is_part(PyObject *part);

static int is_node(PyObject *node)
{
    if (node == Py_None || node == Py_Ellipsis)
        return 1;
    if (!PyTuple_Check(node) || PyTuple_GET_SIZE(node) != PARTS || !PyType_Check(PyTuple_GET_ITEM(node, KIND)))
        return 0;
    PyObject *members = PyTuple_GET_ITEM(node, MEMBERS);
    if (PyTuple_GET_ITEM(node, KIND) == (PyObject *)&_PyWeakref_RefType)
        return PyLong_CheckExact(members) && PyLong_AsSsize_t(members) >= 0;
    return (members == Py_None || are_nodes(members)) &&
           is_part(PyTuple_GET_ITEM(node, ITEMS)) && is_part(PyTuple_GET_ITEM(node, SLOTS)) &&
           is_part(PyTuple_GET_ITEM(node, ATTRIBUTES));
}

static int is_part(PyObject *part)
{
    if (part == Py_None)
        return 1;
    if (!PyTuple_Check(part) || PyTuple_GET_SIZE(part) != 2 || !PyTuple_Check(PyTuple_GET_ITEM(part, 0)))
        return 0;
    PyObject *nodes = PyTuple_GET_ITEM(part, 1);
    return are_nodes(nodes) && PyTuple_GET_SIZE(nodes) == PyTuple_GET_SIZE(PyTuple_GET_ITEM(part, 0));
}

int are_nodes(PyObject *nodes)
{
    if (!PyTuple_Check(nodes))
        return 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(nodes); i++)
        if (!is_node(PyTuple_GET_ITEM(nodes, i)))
            return 0;
    return 1;
}
