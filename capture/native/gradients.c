/* Gradients: those of the last replay, which may stay where they are if nobody else has got hold of them. */
#include "torch_abi.h"

#define NAMES(X) X(grad) X(untyped_storage) X(_cdata) X(storage) X(alone) X(address) X(__dict__)
NAMES(DECLARE)

/* The gradient lies on the source's storage, which nobody else uses. */
static int is_alone(PyObject *gradient, PyObject *source, PyObject *count)
{
    PyObject *storage = PyObject_CallMethodNoArgs(gradient, s_untyped_storage);
    PyObject *known = storage == NULL ? NULL : PyObject_GetAttr(source, s_storage);
    int alone = known == NULL ? -1 : known == storage;
    if (alone > 0) {
        PyObject *address = PyObject_GetAttr(storage, s__cdata);
        long long holders = address == NULL ? -1 : number_of(PyObject_CallOneArg(count, address));
        long long others = holders < 0 ? -1 : number_of(PyObject_GetAttr(source, s_alone));
        alone = others < 0 ? -1 : holders <= others + 1;
        Py_XDECREF(address);
    }
    Py_XDECREF(known);
    Py_XDECREF(storage);
    return alone;
}

/* Nobody hung anything on the gradient, and it is where the source made it. */
static int is_as_made(PyObject *gradient, PyObject *source)
{
    uint64_t address = 0;
    PyObject *known = PyObject_GetAttr(source, s_address);
    int same = known == NULL || address_of(gradient, &address) < 0 ? -1 : PyLong_AsUnsignedLongLong(known) == address;
    Py_XDECREF(known);
    if (same <= 0)
        return PyErr_Occurred() ? -1 : same;
    PyObject *own = PyObject_GetAttr(gradient, s___dict__);
    int plain = own == NULL ? -1 : !PyDict_Check(own) ? 0 : PyDict_GET_SIZE(own) == 0;
    Py_XDECREF(own);
    return plain;
}

static PyObject *gradient_counts(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *parameter, *uses;
    if (!PyArg_ParseTuple(args, "OO", &parameter, &uses))
        return NULL;
    PyObject *gradient = PyObject_GetAttr(parameter, s_grad);
    PyObject *found = gradient == NULL ? NULL : PyObject_CallOneArg(uses, gradient);
    PyObject *result = found == NULL ? NULL : Py_BuildValue("On", found, Py_REFCNT(gradient));
    Py_XDECREF(found);
    Py_XDECREF(gradient);
    return result;
}

static int is_untouched(
    PyObject *gradient, PyObject *source, PyObject *count, PyObject *uses, long long used, Py_ssize_t references)
{
    if (gradient == Py_None || Py_REFCNT(gradient) != references)
        return 0;
    long long number = number_of(PyObject_CallOneArg(uses, gradient));
    int same = number < 0 ? -1 : number == used;
    if (same > 0)
        same = is_alone(gradient, source, count);
    return same > 0 ? is_as_made(gradient, source) : same;
}

static PyObject *are_untouched(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *parameters, *sources, *count, *uses, *fresh;
    long long used;
    Py_ssize_t references;
    if (!PyArg_ParseTuple(
            args, "O!O!OOO(Ln)", &PyTuple_Type, &parameters, &PyTuple_Type, &sources, &count, &uses, &fresh, &used,
            &references))
        return NULL;
    Py_ssize_t number = PyTuple_GET_SIZE(parameters), taken = 0;
    PyObject **gradients = PyMem_New(PyObject *, number + 1);
    if (gradients == NULL)
        return PyErr_NoMemory();
    int same = number == PyTuple_GET_SIZE(sources);
    for (Py_ssize_t i = 0; same > 0 && i < number; i++) {
        PyObject *parameter = PyTuple_GET_ITEM(parameters, i);
        PyObject *gradient = parameter == Py_None ? Py_NewRef(Py_None) : PyObject_GetAttr(parameter, s_grad);
        if (gradient == NULL) {
            same = -1;
            break;
        }
        gradients[taken++] = gradient;
        same = is_untouched(gradient, PyTuple_GET_ITEM(sources, i), count, uses, used, references);
    }
    if (same > 0)
        same = truth_of(PyObject_Vectorcall(fresh, gradients, taken, NULL));
    while (taken)
        Py_DECREF(gradients[--taken]);
    PyMem_Free(gradients);
    return same < 0 ? NULL : PyBool_FromLong(same);
}

/* Gradients that were found untouched once, and are so as long as nothing that torch and Python count has moved. They
   are not kept alive: another object where one was is told by its storage, which its watch holds. */
typedef struct {
    const PyObject *object;
    PyObject *watch; /* StorageWatch */
    KnownTensor known;
    long long holders, users; /* torch's counts of the tensor and of its storage */
    Py_ssize_t references, storage_references; /* Python's */
} KnownGradient;

typedef struct {
    PyObject_HEAD
    Py_ssize_t count;
    KnownGradient *gradients;
    PyObject *uses; /* a function: strong holders of a tensor */
    vectorcallfunc vectorcall;
} Untouched;

/* Nobody hung an attribute on it: 1, 0, -1. */
static int has_no_attributes(PyObject *gradient)
{
    PyObject *own = PyObject_GetAttr(gradient, s___dict__);
    int bare = own == NULL ? -1 : PyDict_Check(own) && PyDict_GET_SIZE(own) == 0;
    Py_XDECREF(own);
    return bare;
}

/* The gradient of this parameter is the one that was found, and untouched since: 1, 0, -1. */
static int is_as_found(Untouched *self, const KnownGradient *known, PyObject *parameter)
{
    PyObject *gradient = parameter == Py_None ? Py_NewRef(Py_None) : PyObject_GetAttr(parameter, s_grad);
    if (gradient == NULL)
        return -1;
    int same = gradient == known->object && Py_REFCNT(gradient) == known->references && storage_references(known->watch) == known->storage_references;
    if (same)
        same = is_as_known(gradient, &known->known);
    if (same > 0) {
        long long holders = number_of(PyObject_CallOneArg(self->uses, gradient));
        long long users = holders < 0 ? -1 : storage_holders(known->watch);
        same = users < 0 ? -1 : holders == known->holders && users == known->users;
    }
    if (same > 0)
        same = has_no_attributes(gradient);
    Py_DECREF(gradient);
    return same;
}

static PyObject *untouched_call(PyObject *object, PyObject *const *args, size_t nargsf, PyObject *names)
{
    Untouched *self = (Untouched *)object;
    if (PyVectorcall_NARGS(nargsf) != 1 || names != NULL || !PyTuple_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "it takes a tuple of parameters");
        return NULL;
    }
    int same = PyTuple_GET_SIZE(args[0]) == self->count;
    for (Py_ssize_t i = 0; same > 0 && i < self->count; i++)
        same = is_as_found(self, &self->gradients[i], PyTuple_GET_ITEM(args[0], i));
    return same < 0 ? NULL : PyBool_FromLong(same);
}

static int untouched_traverse(PyObject *object, visitproc visit, void *arg)
{
    Untouched *self = (Untouched *)object;
    for (Py_ssize_t i = 0; i < self->count; i++)
        Py_VISIT(self->gradients[i].watch);
    Py_VISIT(self->uses);
    return 0;
}

static int untouched_clear(PyObject *object)
{
    Untouched *self = (Untouched *)object;
    while (self->count) {
        KnownGradient gone = self->gradients[--self->count];
        forget_tensor(&gone.known);
        Py_DECREF(gone.watch);
    }
    return 0;
}

static void untouched_dealloc(PyObject *object)
{
    PyObject_GC_UnTrack(object);
    untouched_clear(object);
    Py_XDECREF(((Untouched *)object)->uses);
    PyMem_Free(((Untouched *)object)->gradients);
    Py_TYPE(object)->tp_free(object);
}

/* Notes a parameter's gradient, with all counts of its holders, of which none is more than where it was found to be
   untouched: another thread may have come to hold it since. 0, -1. */
static int know_gradient(
    Untouched *self, KnownGradient *known, PyObject *parameter, PyObject *watch, long long used, Py_ssize_t references)
{
    PyObject *gradient = PyObject_GetAttr(parameter, s_grad);
    if (gradient == NULL)
        return -1;
    *known = (KnownGradient){.object = gradient, .references = Py_REFCNT(gradient)};
    int failed = !is_plain_tensor(gradient) || !is_storage_watch(watch);
    if (failed)
        PyErr_SetString(PyExc_ValueError, "this is no gradient on a storage that is watched");
    else
        failed = know_tensor(gradient, &known->known) < 0;
    if (!failed) {
        known->holders = number_of(PyObject_CallOneArg(self->uses, gradient));
        known->users = storage_holders(watch);
        known->storage_references = storage_references(watch);
        Py_ssize_t objects;
        long long users = most_holders(watch, &objects);
        known->users = known->users > users ? users : known->users;
        known->storage_references = known->storage_references > objects ? objects : known->storage_references;
        known->holders = known->holders > used ? used : known->holders;
        known->references = known->references > references ? references : known->references;
        failed = PyErr_Occurred() != NULL;
        if (failed)
            forget_tensor(&known->known);
    }
    Py_DECREF(gradient);
    if (failed)
        return -1;
    known->watch = Py_NewRef(watch);
    return 0;
}

static PyObject *untouched_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"parameters", "watches", "uses", "counts", NULL};
    PyObject *parameters, *watches, *uses;
    long long used;
    Py_ssize_t references;
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "O!O!O(Ln)", names, &PyTuple_Type, &parameters, &PyTuple_Type, &watches, &uses, &used,
            &references))
        return NULL;
    Py_ssize_t count = PyTuple_GET_SIZE(parameters);
    if (PyTuple_GET_SIZE(watches) != count) {
        PyErr_SetString(PyExc_ValueError, "each gradient has one storage");
        return NULL;
    }
    Untouched *self = (Untouched *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->vectorcall = untouched_call;
    self->uses = Py_NewRef(uses);
    self->gradients = PyMem_New(KnownGradient, count + 1);
    int failed = self->gradients == NULL;
    if (failed)
        PyErr_NoMemory();
    while (!failed && self->count < count) {
        KnownGradient *known = &self->gradients[self->count];
        failed = know_gradient(self, known, PyTuple_GET_ITEM(parameters, self->count),
                               PyTuple_GET_ITEM(watches, self->count), used, references) < 0;
        self->count += !failed;
    }
    if (failed)
        Py_CLEAR(self);
    return (PyObject *)self;
}

static PyTypeObject UntouchedType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "capture.native._native.Untouched",
    .tp_doc = "Tells whether the gradients of parameters, given as a tuple, are as they were, and who has them, too.",
    .tp_basicsize = sizeof(Untouched),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(Untouched, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_new = untouched_new,
    .tp_dealloc = untouched_dealloc,
    .tp_traverse = untouched_traverse,
    .tp_clear = untouched_clear,
};

static PyMethodDef functions[] = {
    {"gradient_counts", gradient_counts, METH_VARARGS, "Uses and references of a gradient, as ``are_untouched`` sees."},
    {"are_untouched", are_untouched, METH_VARARGS, "``tree.liveness.are_untouched_gradients``."},
    {NULL, NULL, 0, NULL},
};

int add_gradients(PyObject *module)
{
    NAMES(INTERN)
    if (PyType_Ready(&UntouchedType) < 0 || PyModule_AddObjectRef(module, "Untouched", (PyObject *)&UntouchedType) < 0)
        return -1;
    return PyModule_AddFunctions(module, functions);
}
