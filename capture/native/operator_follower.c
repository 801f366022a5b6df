/* Follow: compares an operator with the one that a watched run had in its place, and runs it.

   It does what ``VerifyingRecorder`` does, for operators that only read tensors of the run and the expected numbers. All
   others are left to Python, which finds everything unchanged. */
#include "native.h"
#include "torch_abi.h"

#include <structmember.h>

typedef struct {
    PyObject_HEAD
    PyObject *miss;
    PyObject *sequence;  /* a tuple: names of the operators to come */
    PyObject *scalars;   /* a tuple: of each, its arguments that are no tensors, as text */
    PyObject *known;     /* a dict by ``id`` of the inputs' tensors */
    PyObject *starts;    /* a dict by the address where an input begins */
    PyObject *operators; /* a dict by ``id``: name, what runs it, whether it makes a view */
    PyObject *kinds;     /* a frozenset: types of tensors */
    PyObject *printed;   /* a frozenset: types whose text is their ``repr`` */
    PyObject *shapes_alone, *differentiates, *capturing, *count; /* functions */
    Py_ssize_t index;              /* of the operator to come */
    long long nodes;               /* of the graph after the last one */
    unsigned long long begin, end; /* memory that holds nothing but what the body made, and staged inputs */
} Follow;

static PyTypeObject FollowType;

/* Where an argument is special, without an exception, the operator is left to Python. */
enum { FAILED = -1, SPECIAL = 0, FITS = 1 };

/* Memory that is known, as that of an input or of what the body made. */
static int is_at_home(Follow *self, PyObject *tensor)
{
    PyObject *key = PyLong_FromVoidPtr(tensor);
    int found = key == NULL ? FAILED : PyDict_Contains(self->known, key);
    Py_XDECREF(key);
    uint64_t address;
    if (found != SPECIAL)
        return found;
    /* not by ``data_ptr``, in the place of which a slower function stands while a body is watched */
    if (!(is_plain_tensor(tensor) && read_address(tensor, &address)) && address_of(tensor, &address) < 0)
        return FAILED;
    if (self->begin <= address && address < self->end)
        return FITS;
    key = PyLong_FromUnsignedLongLong(address);
    found = key == NULL ? FAILED : PyDict_Contains(self->starts, key);
    Py_XDECREF(key);
    return found;
}

/* A number as text; a list is opened. NULL without an exception for what is special. ``tensors``: counts them. */
static PyObject *text_of(Follow *self, PyObject *value, Py_ssize_t *tensors)
{
    PyObject *type = (PyObject *)Py_TYPE(value);
    int found = PySet_Contains(self->printed, type);
    if (found)
        return found < 0 ? NULL : PyObject_Repr(value);
    found = PySet_Contains(self->kinds, type);
    if (found > 0 && is_at_home(self, value) == FITS) {
        ++*tensors;
        return PyUnicode_FromString("tensor");
    }
    return NULL;
}

static PyObject *list_text(Follow *self, PyObject *list, Py_ssize_t *tensors)
{
    PyObject *text = PyUnicode_FromString("["), *separator = PyUnicode_FromString(", ");
    for (Py_ssize_t i = 0; text != NULL && separator != NULL && i < PyList_GET_SIZE(list); i++) {
        PyObject *one = text_of(self, PyList_GET_ITEM(list, i), tensors);
        if (one == NULL) {
            Py_CLEAR(text);
            break;
        }
        if (i)
            PyUnicode_Append(&text, separator);
        if (text != NULL)
            PyUnicode_Append(&text, one);
        Py_DECREF(one);
    }
    if (text != NULL)
        PyUnicode_AppendAndDel(&text, PyUnicode_FromString("]"));
    Py_XDECREF(separator);
    return text;
}

/* The argument is a tensor at home, or has the ``expected`` text; ``*used`` tells which. */
static int argument_fits(
    Follow *self, PyObject *value, Py_ssize_t position, PyObject *expected, int *used, Py_ssize_t *tensors)
{
    int found = PySet_Contains(self->kinds, (PyObject *)Py_TYPE(value));
    *used = found == 0;
    if (found) {
        ++*tensors;
        return found < 0 ? FAILED : is_at_home(self, value);
    }
    if (expected == NULL)
        return SPECIAL;
    PyObject *text = PyList_CheckExact(value) ? list_text(self, value, tensors) : text_of(self, value, tensors);
    PyObject *whole = text == NULL ? NULL : PyUnicode_FromFormat("%zd=%U", position, text);
    Py_XDECREF(text);
    if (whole == NULL)
        return PyErr_Occurred() ? FAILED : SPECIAL;
    found = PyUnicode_Check(expected) && PyUnicode_Compare(whole, expected) == 0;
    Py_DECREF(whole);
    return found;
}

static int arguments_fit(Follow *self, PyObject *args, PyObject *expected)
{
    Py_ssize_t next = 0, tensors = 0, count = PyTuple_GET_SIZE(expected);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args); i++) {
        PyObject *text = next < count ? PyTuple_GET_ITEM(expected, next) : NULL;
        int used, fits = argument_fits(self, PyTuple_GET_ITEM(args, i), i, text, &used, &tensors);
        if (fits != FITS)
            return fits;
        next += used;
    }
    return next == count && tensors > 0;
}

/* The function, called without arguments, gives something true: 1, 0, -1. */
static int tells(PyObject *function)
{
    return truth_of(PyObject_CallNoArgs(function));
}

/* Nodes of the graph now: 0, or -1 with an exception set. */
static int count_nodes(Follow *self, long long *now)
{
    *now = number_of(PyObject_CallNoArgs(self->count));
    return *now == -1 && PyErr_Occurred() ? -1 : 0;
}

static int nodes_are(Follow *self)
{
    long long now;
    return count_nodes(self, &now) < 0 ? FAILED : now == self->nodes;
}

static PyObject *run_operator(Follow *self, PyObject *run, PyObject *args, int view)
{
    self->index++;
    PyObject *result = PyObject_Call(run, args, NULL);
    if (result != NULL && !view && count_nodes(self, &self->nodes) < 0)
        Py_CLEAR(result);
    return result;
}

static PyObject *follow_call(PyObject *object, PyObject *given, PyObject *names)
{
    Follow *self = (Follow *)object;
    PyObject *op, *args, *kwargs;
    if (names != NULL || !PyArg_ParseTuple(given, "OO!O", &op, &PyTuple_Type, &args, &kwargs))
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_TypeError, "this takes an operator and what it gets");
    if (self->index < 0 || self->index >= PyTuple_GET_SIZE(self->sequence) ||
        self->index >= PyTuple_GET_SIZE(self->scalars) || (PyDict_Check(kwargs) && PyDict_GET_SIZE(kwargs)))
        return Py_NewRef(self->miss);
    PyObject *key = PyLong_FromVoidPtr(op);
    PyObject *found = key == NULL ? NULL : PyDict_GetItemWithError(self->operators, key), *name, *run;
    PyObject *expected = PyTuple_GET_ITEM(self->scalars, self->index);
    int view, fits;
    Py_XDECREF(key);
    if (found == NULL || !PyTuple_Check(expected))
        return PyErr_Occurred() ? NULL : Py_NewRef(self->miss);
    if (!PyArg_ParseTuple(found, "UOp", &name, &run, &view))
        return NULL;
    fits = PyObject_RichCompareBool(PyTuple_GET_ITEM(self->sequence, self->index), name, Py_EQ);
    if (fits == FITS && (fits = tells(self->shapes_alone)) >= 0)
        fits = !fits;
    if (fits == FITS && (fits = tells(self->differentiates)) >= 0)
        fits = !fits;
    if (fits == FITS)
        fits = arguments_fit(self, args, expected);
    if (fits == FITS && !view && (fits = tells(self->capturing)) == FITS)
        fits = nodes_are(self);
    if (fits != FITS)
        return fits == FAILED ? NULL : Py_NewRef(self->miss);
    return run_operator(self, run, args, view);
}

#define OBJECTS(X) \
    X(miss) X(sequence) X(scalars) X(known) X(starts) X(operators) X(kinds) X(printed) X(shapes_alone) \
    X(differentiates) X(capturing) X(count)

static int follow_visit(PyObject *object, visitproc visit, void *arg)
{
    Follow *self = (Follow *)object;
#define VISIT(name) Py_VISIT(self->name);
    OBJECTS(VISIT)
    return 0;
}

static void follow_free(PyObject *object)
{
    Follow *self = (Follow *)object;
    PyObject_GC_UnTrack(object);
#define DROP(name) Py_XDECREF(self->name);
    OBJECTS(DROP)
    Py_TYPE(object)->tp_free(object);
}

static PyObject *follow_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
#define NAME(name) #name,
    static char *names[] = {OBJECTS(NAME) NULL};
    Follow given = {0};
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "$OO!O!O!O!O!O!O!OOOO", names, &given.miss, &PyTuple_Type, &given.sequence, &PyTuple_Type,
            &given.scalars, &PyDict_Type, &given.known, &PyDict_Type, &given.starts, &PyDict_Type, &given.operators,
            &PyFrozenSet_Type, &given.kinds, &PyFrozenSet_Type, &given.printed, &given.shapes_alone,
            &given.differentiates, &given.capturing, &given.count))
        return NULL;
    Follow *self = (Follow *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
#define KEEP(name) self->name = Py_NewRef(given.name);
    OBJECTS(KEEP)
    return (PyObject *)self;
}

static PyMemberDef members[] = {
    {"index", T_PYSSIZET, offsetof(Follow, index), 0, "Of the operator to come."},
    {"nodes", T_LONGLONG, offsetof(Follow, nodes), 0, "Of the graph after the last operator."},
    {"begin", T_ULONGLONG, offsetof(Follow, begin), 0, "Of memory that the body made."},
    {"end", T_ULONGLONG, offsetof(Follow, end), 0, "Of memory that the body made."},
    {NULL},
};

static PyTypeObject FollowType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "capture.native._native.Follow",
    .tp_doc = "Looks at an operator of a run that has to be what a watched run was, and runs it.",
    .tp_basicsize = sizeof(Follow),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_call = follow_call,
    .tp_members = members,
    .tp_new = follow_new,
    .tp_dealloc = follow_free,
    .tp_traverse = follow_visit,
};

int add_follow(PyObject *module)
{
    return PyType_Ready(&FollowType) < 0 ? -1 : PyModule_AddObjectRef(module, "Follow", (PyObject *)&FollowType);
}
