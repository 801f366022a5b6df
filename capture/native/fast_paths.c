/* The fast paths of one captured function. The path that followed the last one before is tried first, as calls repeat in loops. */
#include "native.h"

#include <string.h>

#define MOST_PATHS 32 /* looked at in turn; others are found by the shapes of the call */

typedef struct {
    PyObject_HEAD
    PyObject *miss;
    Py_ssize_t count;
    PyObject *paths[MOST_PATHS];
    Py_ssize_t last;             /* the one that was taken last */
    Py_ssize_t after[MOST_PATHS]; /* which one was taken after each */
    vectorcallfunc vectorcall;
} FastPaths;

static PyTypeObject FastPathsType;

/* The result of a call by one of them; ``*modes``: those looked at last, ``*hold``: whether they do. */
static PyObject *try_one(
    FastPaths *self, Py_ssize_t at, PyObject *const *args, Py_ssize_t count, int bound, PyObject **modes, int *hold)
{
    PyObject *path = Py_NewRef(self->paths[at]);
    if (modes_of(path) != *modes) {
        Py_XSETREF(*modes, Py_XNewRef(modes_of(path)));
        *hold = *modes == NULL ? 0 : modes_hold(*modes);
    }
    PyObject *result = *hold > 0 ? path_take(path, args, count, bound) : *hold < 0 ? NULL : Py_NewRef(self->miss);
    if (result != self->miss && at < self->count && self->paths[at] == path) {
        self->after[self->last] = at;
        self->last = at;
    }
    Py_DECREF(path);
    return result;
}

/* The result of the first one that takes the call, the guess before all others; else MISS. */
static PyObject *try_all(FastPaths *self, PyObject *const *args, Py_ssize_t count, int bound)
{
    PyObject *modes = NULL, *result = Py_NewRef(self->miss);
    Py_ssize_t guess = self->after[self->last];
    int hold = 0;
    for (Py_ssize_t i = -1; result == self->miss && i < self->count; i++) {
        Py_ssize_t at = i < 0 ? guess : i;
        if (at >= self->count || i == guess)
            continue;
        Py_DECREF(result);
        result = try_one(self, at, args, count, bound, &modes, &hold);
    }
    Py_XDECREF(modes);
    return result;
}

static PyObject *paths_call(PyObject *object, PyObject *const *args, size_t nargsf, PyObject *names)
{
    FastPaths *self = (FastPaths *)object;
    if (names != NULL)
        return Py_NewRef(self->miss);
    return try_all(self, args, PyVectorcall_NARGS(nargsf), 0);
}

static PyObject *paths_bound(PyObject *object, PyObject *values)
{
    if (!PyTuple_Check(values)) {
        PyErr_SetString(PyExc_TypeError, "bound values are a tuple");
        return NULL;
    }
    return try_all((FastPaths *)object, &PyTuple_GET_ITEM(values, 0), PyTuple_GET_SIZE(values), 1);
}

static PyObject *paths_add(PyObject *object, PyObject *path)
{
    FastPaths *self = (FastPaths *)object;
    if (!is_path(path)) {
        PyErr_SetString(PyExc_TypeError, "this is no fast path");
        return NULL;
    }
    Py_ssize_t at = 0;
    while (at < self->count && self->paths[at] != path)
        at++;
    PyObject *gone = NULL;
    if (at == self->count && self->count < MOST_PATHS)
        self->count++;
    else
        gone = self->paths[at < self->count ? at : --at];
    for (; at > 0; at--)
        self->paths[at] = self->paths[at - 1];
    self->paths[0] = Py_NewRef(path);
    self->last = 0;
    memset(self->after, 0, sizeof(self->after));
    Py_XDECREF(gone);
    Py_RETURN_NONE;
}

static PyObject *paths_remove(PyObject *object, PyObject *path)
{
    FastPaths *self = (FastPaths *)object;
    Py_ssize_t at = 0;
    while (at < self->count && self->paths[at] != path)
        at++;
    if (at == self->count)
        Py_RETURN_NONE;
    PyObject *gone = self->paths[at];
    self->count--;
    for (; at < self->count; at++)
        self->paths[at] = self->paths[at + 1];
    self->last = 0;
    memset(self->after, 0, sizeof(self->after));
    Py_DECREF(gone);
    Py_RETURN_NONE;
}

static int paths_forget(PyObject *object)
{
    FastPaths *self = (FastPaths *)object;
    self->last = 0;
    memset(self->after, 0, sizeof(self->after));
    while (self->count) {
        PyObject *path = self->paths[--self->count];
        Py_DECREF(path);
    }
    return 0;
}

static PyObject *paths_clear(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    paths_forget(self);
    Py_RETURN_NONE;
}

static int paths_traverse(PyObject *object, visitproc visit, void *arg)
{
    FastPaths *self = (FastPaths *)object;
    Py_VISIT(self->miss);
    for (Py_ssize_t i = 0; i < self->count; i++)
        Py_VISIT(self->paths[i]);
    return 0;
}

static void paths_dealloc(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    paths_forget(self);
    Py_XDECREF(((FastPaths *)self)->miss);
    Py_TYPE(self)->tp_free(self);
}

static PyObject *paths_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *miss;
    static char *names[] = {"miss", NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O", names, &miss))
        return NULL;
    FastPaths *self = (FastPaths *)type->tp_alloc(type, 0);
    if (self != NULL) {
        self->vectorcall = paths_call;
        self->miss = Py_NewRef(miss);
    }
    return (PyObject *)self;
}

static PyMethodDef methods[] = {
    {"bound", paths_bound, METH_O, "The result of a call with these values of all parameters, or MISS."},
    {"add", paths_add, METH_O, "Take this path first from now on."},
    {"remove", paths_remove, METH_O, "Forget this path, if it is there."},
    {"clear", paths_clear, METH_NOARGS, "Forget all."},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject FastPathsType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "capture.native._native.FastPaths",
    .tp_doc = "The result of a call that one of the paths is made for; MISS for any other.",
    .tp_basicsize = sizeof(FastPaths),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(FastPaths, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_new = paths_new,
    .tp_dealloc = paths_dealloc,
    .tp_traverse = paths_traverse,
    .tp_clear = paths_forget,
    .tp_methods = methods,
};

/* Instances: the paths of each instance that has some, as a method's wrapper calls it. */
typedef struct {
    PyObject_HEAD
    PyObject *instances; /* by ``id``: a weak reference to the instance, its state, its paths */
    PyObject *miss;
    vectorcallfunc vectorcall;
} InstancePaths;

static PyObject *instances_call(PyObject *object, PyObject *const *args, size_t nargsf, PyObject *names)
{
    InstancePaths *self = (InstancePaths *)object;
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
    PyObject *reference = PyTuple_GET_ITEM(known, 0), *paths = PyTuple_GET_ITEM(known, 2);
    if (!PyWeakref_Check(reference) || referent_of(reference) != args[0] || Py_TYPE(paths) != &FastPathsType)
        return Py_NewRef(self->miss);
    Py_INCREF(paths);
    PyObject *result = paths_call(paths, &PyTuple_GET_ITEM(args[1], 0), PyTuple_GET_SIZE(args[1]), NULL);
    Py_DECREF(paths);
    return result;
}

static int instances_traverse(PyObject *object, visitproc visit, void *arg)
{
    Py_VISIT(((InstancePaths *)object)->instances);
    Py_VISIT(((InstancePaths *)object)->miss);
    return 0;
}

/* Nothing is cleared to break a cycle: whoever keeps the instances clears them. */
static void instances_dealloc(PyObject *object)
{
    PyObject_GC_UnTrack(object);
    Py_XDECREF(((InstancePaths *)object)->instances);
    Py_XDECREF(((InstancePaths *)object)->miss);
    Py_TYPE(object)->tp_free(object);
}

static PyObject *instances_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *instances, *miss;
    static char *names[] = {"instances", "miss", NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O", names, &PyDict_Type, &instances, &miss))
        return NULL;
    InstancePaths *self = (InstancePaths *)type->tp_alloc(type, 0);
    if (self != NULL) {
        self->instances = Py_NewRef(instances);
        self->miss = Py_NewRef(miss);
        self->vectorcall = instances_call;
    }
    return (PyObject *)self;
}

static PyTypeObject InstancePathsType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "capture.native._native.InstancePaths",
    .tp_doc = "A call of one of many instances.",
    .tp_basicsize = sizeof(InstancePaths),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(InstancePaths, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_new = instances_new,
    .tp_dealloc = instances_dealloc,
    .tp_traverse = instances_traverse,
};

int add_fast_paths(PyObject *module)
{
    if (PyType_Ready(&FastPathsType) < 0 || PyType_Ready(&InstancePathsType) < 0 ||
        PyModule_AddObjectRef(module, "InstancePaths", (PyObject *)&InstancePathsType) < 0)
        return -1;
    return PyModule_AddObjectRef(module, "FastPaths", (PyObject *)&FastPathsType);
}
