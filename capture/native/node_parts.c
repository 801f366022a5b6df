/* What of a node leads to objects of the user: its guards, its function, what it gives back.

   A tree keeps its nodes for as long as its thread lives, and a function may lead to itself, as a trainer's step does. So
   these parts belong to the function (``Entry.parts``); a node of a tree refers to them without keeping them. A weak
   reference of Python's would not do: the collector clears it before it asks the function to end, which needs them. */
#include "native.h"

#include <string.h>
#include <structmember.h>

typedef struct PartsRef {
    PyObject_HEAD
    NodeParts *parts; /* not kept: NULL once they are gone */
} PartsRef;

#define PARTS(X) \
    X(view) X(check) X(recording) X(function) X(outputs) X(guard) X(statics) X(program) X(generators) X(bound) X(proofs) \
    X(listed_in)
#define MEMBER(name) {#name, T_OBJECT, offsetof(NodeParts, name), 0, NULL},
static PyMemberDef parts_members[] = {PARTS(MEMBER){NULL, 0, 0, 0, NULL}};

static int visit_parts(PyObject *object, visitproc visit, void *arg)
{
    NodeParts *self = (NodeParts *)object;
#define VISIT(name) Py_VISIT(self->name);
    PARTS(VISIT)
    return 0;
}

static int clear_parts(PyObject *object)
{
    NodeParts *self = (NodeParts *)object;
    if (self->ref != NULL)
        ((PartsRef *)self->ref)->parts = NULL;
    Py_CLEAR(self->ref);
#define CLEAR(name) Py_CLEAR(self->name);
    PARTS(CLEAR)
    return 0;
}

static void free_parts(PyObject *object)
{
    PyObject_GC_UnTrack(object);
    clear_parts(object);
    Py_TYPE(object)->tp_free(object);
}

PyTypeObject NodePartsType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "capture.native._native.NodeParts",
    .tp_doc = "What of a node leads to objects of the user.",
    .tp_basicsize = sizeof(NodeParts),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_dealloc = free_parts,
    .tp_traverse = visit_parts,
    .tp_clear = clear_parts,
    .tp_members = parts_members,
};

static PyObject *parts_or_none(PyObject *object, PyObject *args, PyObject *kwargs)
{
    (void)args;
    (void)kwargs;
    NodeParts *parts = ((PartsRef *)object)->parts;
    return Py_NewRef(parts == NULL ? Py_None : (PyObject *)parts);
}

static void free_ref(PyObject *object)
{
    Py_TYPE(object)->tp_free(object);
}

static PyTypeObject PartsRefType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "capture.native._native.PartsRef",
    .tp_doc = "Called, gives the parts that it does not keep, or None.",
    .tp_basicsize = sizeof(PartsRef),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_dealloc = free_ref,
    .tp_call = parts_or_none,
};

/* The one reference of these parts that does not keep them. */
static PyObject *reference_to(PyObject *module, PyObject *parts)
{
    (void)module;
    if (!is_of(parts, &NodePartsType))
        return NULL;
    NodeParts *self = (NodeParts *)parts;
    if (self->ref == NULL && (self->ref = PyType_GenericAlloc(&PartsRefType, 0)) != NULL)
        ((PartsRef *)self->ref)->parts = self;
    return Py_XNewRef(self->ref);
}

NodeParts *parts_of(PyObject *node)
{
    PyObject *parts = is_of(node, slots.Node.type) ? SLOT(node, Node, parts) : NULL;
    if (parts != NULL && Py_TYPE(parts) == &PartsRefType && ((PartsRef *)parts)->parts != NULL)
        parts = (PyObject *)((PartsRef *)parts)->parts;
    return parts != NULL && is_of(parts, &NodePartsType) ? (NodeParts *)parts : NULL;
}

/* An attribute of a node that lies in its parts. */
typedef struct {
    PyObject_HEAD
    Py_ssize_t at;   /* in the parts */
    NodeParts *none; /* stands for parts that are gone */
} NodePart;

static PyObject *part_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"name", "none", NULL};
    const char *name;
    PyObject *none;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "sO!", names, &name, &NodePartsType, &none))
        return NULL;
    for (const PyMemberDef *member = parts_members; member->name != NULL; member++)
        if (strcmp(member->name, name) == 0) {
            NodePart *self = (NodePart *)type->tp_alloc(type, 0);
            if (self != NULL) {
                self->at = member->offset;
                self->none = (NodeParts *)Py_NewRef(none);
            }
            return (PyObject *)self;
        }
    return PyErr_Format(PyExc_ValueError, "%s is no part of a node", name);
}

static void part_free(PyObject *object)
{
    Py_DECREF(((NodePart *)object)->none);
    Py_TYPE(object)->tp_free(object);
}

static PyObject *part_get(PyObject *object, PyObject *node, PyObject *type)
{
    (void)type;
    if (node == NULL)
        return Py_NewRef(object);
    PyObject *parts = (PyObject *)parts_of(node);
    if (parts == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_TypeError))
            return NULL;
        PyErr_Clear();
        parts = (PyObject *)((NodePart *)object)->none;
    }
    PyObject *found = *(PyObject **)((char *)parts + ((NodePart *)object)->at);
    return Py_NewRef(found == NULL ? Py_None : found);
}

static int part_set(PyObject *object, PyObject *node, PyObject *value)
{
    PyObject *parts = (PyObject *)parts_of(node);
    if (parts == NULL || value == NULL) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_AttributeError, "a node's parts are not deleted one by one");
        return -1;
    }
    PyObject **place = (PyObject **)((char *)parts + ((NodePart *)object)->at);
    Py_INCREF(parts);
    Py_XSETREF(*place, Py_NewRef(value));
    Py_DECREF(parts);
    return 0;
}

static PyTypeObject NodePartType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "capture.native._native.NodePart",
    .tp_doc = "An attribute of a node that lies in its parts.",
    .tp_basicsize = sizeof(NodePart),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = part_new,
    .tp_dealloc = part_free,
    .tp_descr_get = part_get,
    .tp_descr_set = part_set,
};

static PyMethodDef functions[] = {
    {"reference_to", reference_to, METH_O, "A reference to a node's parts that does not keep them."},
    {NULL, NULL, 0, NULL},
};

int add_node_parts(PyObject *module)
{
    if (PyType_Ready(&NodePartType) < 0 ||
        PyModule_AddObjectRef(module, "NodePart", (PyObject *)&NodePartType) < 0)
        return -1;
    if (PyType_Ready(&NodePartsType) < 0 || PyType_Ready(&PartsRefType) < 0 ||
        PyModule_AddObjectRef(module, "NodeParts", (PyObject *)&NodePartsType) < 0)
        return -1;
    return PyModule_AddFunctions(module, functions);
}
