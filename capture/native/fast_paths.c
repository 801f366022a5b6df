/* Ways: those of one captured function. What followed the last one last time is tried first, as loops come round. */
#include "native.h"

#include <string.h>

#define MOST_WAYS 32 /* looked at in turn; others are found by the shapes of the call */

typedef struct {
    PyObject_HEAD
    PyObject *miss;
    Py_ssize_t count;
    PyObject *ways[MOST_WAYS];
    Py_ssize_t last;             /* the one that was taken last */
    Py_ssize_t after[MOST_WAYS]; /* which one was taken after each */
    vectorcallfunc vectorcall;
} Ways;

static PyTypeObject WaysType;

/* The result of a call by one of them; ``*modes``: those looked at last, ``*hold``: whether they do. */
static PyObject *try_one(Ways *self, Py_ssize_t at, PyObject *const *args, size_t count, PyObject **modes, int *hold)
{
    PyObject *way = Py_NewRef(self->ways[at]);
    if (modes_of(way) != *modes) {
        Py_XSETREF(*modes, Py_XNewRef(modes_of(way)));
        *hold = *modes == NULL ? 0 : modes_hold(*modes);
    }
    PyObject *result = *hold > 0 ? way_take(way, args, count) : *hold < 0 ? NULL : Py_NewRef(self->miss);
    if (result != self->miss && at < self->count && self->ways[at] == way) {
        self->after[self->last] = at;
        self->last = at;
    }
    Py_DECREF(way);
    return result;
}

static PyObject *ways_call(PyObject *object, PyObject *const *args, size_t nargsf, PyObject *names)
{
    Ways *self = (Ways *)object;
    Py_ssize_t count = PyVectorcall_NARGS(nargsf), guess = self->after[self->last];
    PyObject *modes = NULL, *result = Py_NewRef(self->miss);
    int hold = 0;
    for (Py_ssize_t i = -1; names == NULL && result == self->miss && i < self->count; i++) {
        Py_ssize_t at = i < 0 ? guess : i;
        if (at >= self->count || i == guess)
            continue;
        Py_DECREF(result);
        result = try_one(self, at, args, count, &modes, &hold);
    }
    Py_XDECREF(modes);
    return result;
}

static PyObject *ways_add(PyObject *object, PyObject *way)
{
    Ways *self = (Ways *)object;
    if (!is_way(way)) {
        PyErr_SetString(PyExc_TypeError, "this is no way");
        return NULL;
    }
    Py_ssize_t at = 0;
    while (at < self->count && self->ways[at] != way)
        at++;
    PyObject *gone = NULL;
    if (at == self->count && self->count < MOST_WAYS)
        self->count++;
    else
        gone = self->ways[at < self->count ? at : --at];
    for (; at > 0; at--)
        self->ways[at] = self->ways[at - 1];
    self->ways[0] = Py_NewRef(way);
    self->last = 0;
    memset(self->after, 0, sizeof(self->after));
    Py_XDECREF(gone);
    Py_RETURN_NONE;
}

static int ways_forget(PyObject *object)
{
    Ways *self = (Ways *)object;
    self->last = 0;
    memset(self->after, 0, sizeof(self->after));
    while (self->count) {
        PyObject *way = self->ways[--self->count];
        Py_DECREF(way);
    }
    return 0;
}

static PyObject *ways_clear(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    ways_forget(self);
    Py_RETURN_NONE;
}

static int ways_traverse(PyObject *object, visitproc visit, void *arg)
{
    Ways *self = (Ways *)object;
    Py_VISIT(self->miss);
    for (Py_ssize_t i = 0; i < self->count; i++)
        Py_VISIT(self->ways[i]);
    return 0;
}

static void ways_dealloc(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    ways_forget(self);
    Py_XDECREF(((Ways *)self)->miss);
    Py_TYPE(self)->tp_free(self);
}

static PyObject *ways_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *miss;
    static char *names[] = {"miss", NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O", names, &miss))
        return NULL;
    Ways *self = (Ways *)type->tp_alloc(type, 0);
    if (self != NULL) {
        self->vectorcall = ways_call;
        self->miss = Py_NewRef(miss);
    }
    return (PyObject *)self;
}

static PyMethodDef methods[] = {
    {"add", ways_add, METH_O, "Take this way first from now on."},
    {"clear", ways_clear, METH_NOARGS, "Forget all."},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject WaysType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "capture._native.Ways",
    .tp_doc = "The result of a call that one of the ways is made for; MISS for any other.",
    .tp_basicsize = sizeof(Ways),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(Ways, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_new = ways_new,
    .tp_dealloc = ways_dealloc,
    .tp_traverse = ways_traverse,
    .tp_clear = ways_forget,
    .tp_methods = methods,
};

/* Methods: the ways of each instance that has some, as a method's wrapper calls it. */
typedef struct {
    PyObject_HEAD
    PyObject *instances; /* by ``id``: a weak reference to the instance, its state, its ways */
    PyObject *miss;
    vectorcallfunc vectorcall;
} Methods;

static PyObject *methods_call(PyObject *object, PyObject *const *args, size_t nargsf, PyObject *names)
{
    Methods *self = (Methods *)object;
    if (PyVectorcall_NARGS(nargsf) != 2 || names != NULL || !PyTuple_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "an instance and its arguments, a tuple");
        return NULL;
    }
    PyObject *number = PyLong_FromVoidPtr(args[0]);
    PyObject *known = number == NULL ? NULL : PyDict_GetItemWithError(self->instances, number);
    Py_XDECREF(number);
    if (known == NULL)
        return PyErr_Occurred() ? NULL : Py_NewRef(self->miss);
    if (!PyTuple_CheckExact(known) || PyTuple_GET_SIZE(known) != 3) {
        PyErr_SetString(PyExc_TypeError, "an instance has three parts");
        return NULL;
    }
    PyObject *reference = PyTuple_GET_ITEM(known, 0), *ways = PyTuple_GET_ITEM(known, 2);
    if (!PyWeakref_Check(reference) || referent_of(reference) != args[0] || Py_TYPE(ways) != &WaysType)
        return Py_NewRef(self->miss);
    Py_INCREF(ways);
    PyObject *result = ways_call(ways, &PyTuple_GET_ITEM(args[1], 0), PyTuple_GET_SIZE(args[1]), NULL);
    Py_DECREF(ways);
    return result;
}

static int methods_traverse(PyObject *object, visitproc visit, void *arg)
{
    Py_VISIT(((Methods *)object)->instances);
    Py_VISIT(((Methods *)object)->miss);
    return 0;
}

/* Nothing is cleared to break a cycle: whoever keeps the instances clears them. */
static void methods_dealloc(PyObject *object)
{
    PyObject_GC_UnTrack(object);
    Py_XDECREF(((Methods *)object)->instances);
    Py_XDECREF(((Methods *)object)->miss);
    Py_TYPE(object)->tp_free(object);
}

static PyObject *methods_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *instances, *miss;
    static char *names[] = {"instances", "miss", NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O", names, &PyDict_Type, &instances, &miss))
        return NULL;
    Methods *self = (Methods *)type->tp_alloc(type, 0);
    if (self != NULL) {
        self->instances = Py_NewRef(instances);
        self->miss = Py_NewRef(miss);
        self->vectorcall = methods_call;
    }
    return (PyObject *)self;
}

static PyTypeObject MethodsType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "capture._native.Methods",
    .tp_doc = "A call of one of many instances.",
    .tp_basicsize = sizeof(Methods),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(Methods, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_new = methods_new,
    .tp_dealloc = methods_dealloc,
    .tp_traverse = methods_traverse,
};

int add_ways(PyObject *module)
{
    if (PyType_Ready(&WaysType) < 0 || PyType_Ready(&MethodsType) < 0 ||
        PyModule_AddObjectRef(module, "Methods", (PyObject *)&MethodsType) < 0)
        return -1;
    return PyModule_AddObjectRef(module, "Ways", (PyObject *)&WaysType);
}
