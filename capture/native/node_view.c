/* Views: the parts of a recording that never change, put together once. */
#include "native.h"

#include <structmember.h>

static PyMemberDef node_members[] = {
    {"used", T_LONGLONG, offsetof(NodeView, used), 0, "When it ran last: what ran in this process is counted."},
    {"runs", T_LONGLONG, offsetof(NodeView, runs), 0, "How often it ran, its recording run included."},
    {NULL, 0, 0, 0, NULL},
};

/* A tuple of addresses and None: 0, or -1 with an exception set. */
static int take_places(NodeView *self, PyObject *pattern)
{
    Py_ssize_t count = PyTuple_GET_SIZE(pattern);
    if ((self->places = PyMem_Calloc((size_t)count + 1, sizeof(*self->places))) == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    self->num_places = count;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *place = PyTuple_GET_ITEM(pattern, i);
        self->places[i] = place == Py_None ? 0 : PyLong_AsUnsignedLongLong(place);
        if (PyErr_Occurred())
            return -1;
    }
    return 0;
}

static PyObject *of_node(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"outputs", "source", "several", "live", "pattern", "before", "tensors", "collect", "preserving", NULL};
    NodeView given = {0};
    PyObject *pattern;
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "$OOOO!O!O!O!Op", names, &given.outputs, &given.source, &given.several, &PyList_Type, &given.live,
            &PyTuple_Type, &pattern, &PyTuple_Type, &given.before, &PyList_Type, &given.tensors, &given.collect, &given.preserving))
        return NULL;
    int fits = (given.source == Py_None || PyList_GET_SIZE(given.live) == 1) &&
               (given.several == Py_None || (PyTuple_Check(given.several) && PyTuple_GET_SIZE(given.several) == 9));
    for (Py_ssize_t i = 0; fits && i < PyTuple_GET_SIZE(given.before); i++) {
        PyObject *pair = PyTuple_GET_ITEM(given.before, i);
        fits = PyTuple_Check(pair) && PyTuple_GET_SIZE(pair) == 2 && PyList_Check(PyTuple_GET_ITEM(pair, 0)) &&
               PyLong_Check(PyTuple_GET_ITEM(pair, 1));
    }
    if (!fits) {
        PyErr_SetString(PyExc_ValueError, "a lone output is one group, and what is dead before a list and a place");
        return NULL;
    }
    NodeView *self = (NodeView *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->outputs = Py_NewRef(given.outputs);
    self->source = Py_NewRef(given.source);
    self->several = Py_NewRef(given.several);
    self->live = Py_NewRef(given.live);
    self->before = Py_NewRef(given.before);
    self->tensors = Py_NewRef(given.tensors);
    self->collect = Py_NewRef(given.collect);
    self->preserving = given.preserving;
    if (take_places(self, pattern) < 0)
        Py_CLEAR(self);
    return (PyObject *)self;
}

static int visit_node(PyObject *object, visitproc visit, void *arg)
{
    NodeView *self = (NodeView *)object;
    Py_VISIT(self->outputs);
    Py_VISIT(self->source);
    Py_VISIT(self->several);
    Py_VISIT(self->live);
    Py_VISIT(self->before);
    Py_VISIT(self->tensors);
    Py_VISIT(self->collect);
    return 0;
}

static void free_node(PyObject *object)
{
    NodeView *self = (NodeView *)object;
    PyObject_GC_UnTrack(object);
    Py_XDECREF(self->outputs);
    Py_XDECREF(self->source);
    Py_XDECREF(self->several);
    Py_XDECREF(self->live);
    PyMem_Free(self->places);
    Py_XDECREF(self->before);
    Py_XDECREF(self->tensors);
    Py_XDECREF(self->collect);
    Py_TYPE(object)->tp_free(object);
}

PyTypeObject NodeViewType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "capture.native._native.NodeView",
    .tp_doc = "What stays as it is once a recording is in its tree.",
    .tp_basicsize = sizeof(NodeView),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = of_node,
    .tp_dealloc = free_node,
    .tp_traverse = visit_node,
    .tp_members = node_members,
};

int add_views(PyObject *module)
{
    if (PyType_Ready(&NodeViewType) < 0)
        return -1;
    return PyModule_AddObjectRef(module, "NodeView", (PyObject *)&NodeViewType);
}
