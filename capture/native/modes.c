/* Modes: getters whose results choose kernels. A list of them holds while each returns what it returned before.

   Most are torch's own, written in C: called as their builtin would, they take 5 ns and more where a call takes 30. */
#include "native.h"

#include <string.h>

typedef struct {
    Caller caller;       /* its function may be a string: an attribute of the one argument */
    PyObject *part;      /* a name: what counts is this attribute of what the function gives; or NULL */
    PyObject *expected;
    Py_ssize_t at;       /* where the one argument keeps the attribute, if its class has a slot for it; else -1 */
    int by_equality;     /* a list, a tuple or an enumeration, of which torch makes another one in each call */
} Term;

typedef struct {
    PyObject_HEAD
    uint64_t thread; /* no other one ever has the number */
    Py_ssize_t count;
    Term *terms;
    PyObject *slow;    /* Modes that take long to compare; or NULL */
    PyObject *changes; /* an object that counts what may have changed those */
    Py_ssize_t at;     /* where it keeps the count */
    PyObject *seen;    /* the count when they were found to hold */
    vectorcallfunc vectorcall;
} Modes;

static PyTypeObject ModesType;

int is_modes(PyObject *one)
{
    return Py_TYPE(one) == &ModesType;
}

/* The attribute of an object that a term is about, or NULL with an exception set. */
static PyObject *attribute_of(const Term *term)
{
    PyObject *holder = PyTuple_GET_ITEM(term->caller.arguments, 0), *name = term->caller.function;
    if (term->at >= 0)
        return Py_XNewRef(slot_at(holder, term->at));
    PyObject *found = PyModule_CheckExact(holder) ? PyDict_GetItemWithError(PyModule_GetDict(holder), name) : NULL;
    return found != NULL ? Py_NewRef(found) : PyErr_Occurred() ? NULL : PyObject_GetAttr(holder, name);
}

static PyObject *whole_of(const Term *term)
{
    return PyUnicode_CheckExact(term->caller.function) ? attribute_of(term) : call_again(&term->caller);
}

static PyObject *found_of(const Term *term)
{
    PyObject *whole = whole_of(term);
    if (whole == NULL || term->part == NULL)
        return whole;
    PyObject *part = PyObject_GetAttr(whole, term->part);
    Py_DECREF(whole);
    return part;
}

/* Nothing that could change them happened since they were compared last, or they are as they were all the same. */
static int slow_modes_hold(Modes *self)
{
    PyObject *now = slot_at(self->changes, self->at);
    if (now == NULL || now == self->seen)
        return now == NULL ? -1 : 1;
    Py_INCREF(now); /* read before they are, so that a change meanwhile is looked at next time */
    int same = PyObject_RichCompareBool(now, self->seen, Py_EQ);
    if (same == 0) {
        same = modes_hold(self->slow);
        if (same > 0)
            Py_SETREF(self->seen, Py_NewRef(now));
    }
    Py_DECREF(now);
    return same;
}

int modes_hold(PyObject *object)
{
    Modes *self = (Modes *)object;
    if (self->thread != PyThreadState_GetID(PyThreadState_Get()))
        return 0;
    for (Py_ssize_t i = 0; i < self->count; i++) {
        Term *term = &self->terms[i];
        PyObject *found = found_of(term);
        if (found == NULL) /* a getter that raises says that something is not as it was */
            return drop_error();
        int same = found == term->expected ? 1 : same_value(found, term->expected);
        if (same == 0 && term->by_equality && Py_TYPE(found) == Py_TYPE(term->expected))
            same = PyObject_RichCompareBool(found, term->expected, Py_EQ);
        Py_DECREF(found);
        if (same <= 0)
            return same;
    }
    return self->slow == NULL ? 1 : slow_modes_hold(self);
}

static PyObject *modes_call(PyObject *self, PyObject *const *args, size_t nargsf, PyObject *names)
{
    (void)args;
    if (PyVectorcall_NARGS(nargsf) || names != NULL) {
        PyErr_SetString(PyExc_TypeError, "modes take no arguments");
        return NULL;
    }
    int holds = modes_hold(self);
    return holds < 0 ? NULL : PyBool_FromLong(holds);
}

static int modes_traverse(PyObject *object, visitproc visit, void *arg)
{
    Modes *self = (Modes *)object;
    for (Py_ssize_t i = 0; i < self->count; i++) {
        Py_VISIT(self->terms[i].caller.function);
        Py_VISIT(self->terms[i].caller.arguments);
        Py_VISIT(self->terms[i].expected);
    }
    Py_VISIT(self->slow);
    Py_VISIT(self->changes);
    return 0;
}

static int modes_clear(PyObject *object)
{
    Modes *self = (Modes *)object;
    Py_ssize_t count = self->count;
    Term *terms = self->terms;
    self->count = 0;
    self->terms = NULL;
    for (Py_ssize_t i = 0; i < count; i++) {
        forget_caller(&terms[i].caller);
        Py_XDECREF(terms[i].part);
        Py_DECREF(terms[i].expected);
    }
    PyMem_Free(terms);
    return 0;
}

static void modes_dealloc(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    modes_clear(self);
    Py_XDECREF(((Modes *)self)->slow);
    Py_XDECREF(((Modes *)self)->changes);
    Py_XDECREF(((Modes *)self)->seen);
    Py_TYPE(self)->tp_free(self);
}

static Term term_of(PyObject *function, PyObject *arguments, PyObject *expected, PyObject *part)
{
    Py_ssize_t at = -1;
    if (PyUnicode_CheckExact(function))
        at = slot_of((PyObject *)Py_TYPE(PyTuple_GET_ITEM(arguments, 0)), function);
    int by_equality = !PyFloat_CheckExact(expected); /* by bits: two zeros are others, and one NaN is itself */
    return (Term){caller_of(function, arguments), Py_XNewRef(part), Py_NewRef(expected), at, by_equality};
}

static PyObject *modes_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *given, *slow = NULL, *changes = NULL, *attribute = NULL, *seen = NULL;
    static char *names[] = {"terms", "slow", NULL};
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "O!|(O!OUO)", names, &PyTuple_Type, &given, &ModesType, &slow, &changes, &attribute, &seen))
        return NULL;
    Py_ssize_t at = slow == NULL ? 0 : slot_of((PyObject *)Py_TYPE(changes), attribute);
    if (at < 0) {
        PyErr_SetString(PyExc_ValueError, "the count has to be in a slot");
        return NULL;
    }
    Modes *self = (Modes *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->slow = Py_XNewRef(slow);
    self->changes = Py_XNewRef(changes);
    self->at = at;
    self->seen = Py_XNewRef(seen);
    self->vectorcall = modes_call;
    self->thread = PyThreadState_GetID(PyThreadState_Get());
    self->terms = PyMem_New(Term, PyTuple_GET_SIZE(given) + 1);
    if (self->terms == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(given); i++) {
        PyObject *function, *arguments, *expected, *part = NULL;
        if (!PyArg_ParseTuple(
                PyTuple_GET_ITEM(given, i), "OO!O|U", &function, &PyTuple_Type, &arguments, &expected, &part)) {
            Py_DECREF(self);
            return NULL;
        }
        if (PyUnicode_CheckExact(function) && PyTuple_GET_SIZE(arguments) != 1) {
            PyErr_SetString(PyExc_ValueError, "an attribute of one object");
            Py_DECREF(self);
            return NULL;
        }
        self->terms[i] = term_of(function, arguments, expected, part);
        self->count = i + 1;
    }
    return (PyObject *)self;
}

static PyTypeObject ModesType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "capture.native._native.Modes",
    .tp_doc = "Tells whether functions still give in this thread what they gave.",
    .tp_basicsize = sizeof(Modes),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(Modes, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_new = modes_new,
    .tp_dealloc = modes_dealloc,
    .tp_traverse = modes_traverse,
    .tp_clear = modes_clear,
};

int add_modes(PyObject *module)
{
    return PyType_Ready(&ModesType) < 0 ? -1 : PyModule_AddObjectRef(module, "Modes", (PyObject *)&ModesType);
}
