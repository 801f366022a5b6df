/* Nodes: how many a capture holds so far, asked of the driver twice an operator. */
#include "native.h"

#define ACTIVE 1 /* CU_STREAM_CAPTURE_STATUS_ACTIVE */

typedef struct {
    PyObject_HEAD
    void *stream;
    vectorcallfunc vectorcall;
} NodeCount;

static PyTypeObject NodeCountType;

/* The graph is looked up every time: its handle is void once a capture has failed. */
static PyObject *count_call(PyObject *self, PyObject *const *args, size_t nargsf, PyObject *names)
{
    (void)args;
    if (PyVectorcall_NARGS(nargsf) || names != NULL) {
        PyErr_SetString(PyExc_TypeError, "this takes no arguments");
        return NULL;
    }
    int status = 0;
    uint64_t identity;
    void *graph = NULL;
    size_t count = 0;
    int failed = driver.capture_info(((NodeCount *)self)->stream, &status, &identity, &graph, NULL, NULL);
    if (failed || status != ACTIVE || driver.nodes(graph, NULL, &count))
        return PyLong_FromLong(-1);
    return PyLong_FromSize_t(count);
}

static PyObject *count_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"stream", NULL};
    unsigned long long stream;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "K", names, &stream))
        return NULL;
    if (driver.capture_info == NULL || driver.nodes == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "the driver was not looked for, or cannot be asked");
        return NULL;
    }
    NodeCount *self = (NodeCount *)type->tp_alloc(type, 0);
    if (self != NULL) {
        self->stream = (void *)(uintptr_t)stream;
        self->vectorcall = count_call;
    }
    return (PyObject *)self;
}

static PyTypeObject NodeCountType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "capture.native._native.NodeCount",
    .tp_doc = "Counts the nodes of the capture on a stream; -1 where there is none.",
    .tp_basicsize = sizeof(NodeCount),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(NodeCount, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_new = count_new,
};

int add_node_count(PyObject *module)
{
    return PyType_Ready(&NodeCountType) < 0
               ? -1
               : PyModule_AddObjectRef(module, "NodeCount", (PyObject *)&NodeCountType);
}
