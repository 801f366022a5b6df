/* Binder: one call -> the values of all parameters, and back, as Python itself would pass them.

   A keyword is compared by identity before it is compared as text: names in code are interned, and so are ours. */
#include "native.h"

/* ``inspect._ParameterKind``, which is also the order that parameters come in. */
enum { ONLY_BY_POSITION, EITHER_WAY, STAR, ONLY_BY_NAME, STARS, KINDS };

typedef struct {
    PyObject_HEAD
    PyObject *names;    /* a tuple, one a parameter */
    PyObject *defaults; /* likewise, ``empty`` where there is none */
    PyObject *empty;
    PyObject *by_name;  /* a tuple: the names that can only be given by name */
    Py_ssize_t first;   /* the first parameter that may be given by name; those before have a position alone */
    Py_ssize_t placed;  /* how many, the first ones, may be given by position */
    Py_ssize_t star;    /* where ``*args`` is, or -1 */
    Py_ssize_t stars;   /* where ``**kwargs`` is, or -1 */
    vectorcallfunc vectorcall;
} Binder;

/* The parameter that a keyword names, -1 if there is none, -2 with an exception set. */
static Py_ssize_t place_of(const Binder *self, PyObject *keyword)
{
    Py_ssize_t end = self->stars >= 0 ? self->stars : PyTuple_GET_SIZE(self->names);
    for (Py_ssize_t i = self->first; i < end; i++)
        if (PyTuple_GET_ITEM(self->names, i) == keyword && i != self->star)
            return i;
    for (Py_ssize_t i = self->first; i < end; i++) {
        int same = i == self->star ? 0 : PyObject_RichCompareBool(keyword, PyTuple_GET_ITEM(self->names, i), Py_EQ);
        if (same != 0)
            return same > 0 ? i : -2;
    }
    return -1;
}

/* Errors are in the interpreter's own words, as users see them where there is no function to raise them. */
static void too_many(const Binder *self, Py_ssize_t given)
{
    Py_ssize_t least = 0;
    while (least < self->placed && PyTuple_GET_ITEM(self->defaults, least) == self->empty)
        least++;
    const char *were = given == 1 ? "was" : "were";
    if (least < self->placed)
        PyErr_Format(
            PyExc_TypeError, "takes from %zd to %zd positional arguments but %zd %s given", least, self->placed, given, were);
    else
        PyErr_Format(
            PyExc_TypeError, "takes %zd positional argument%s but %zd %s given", least, least == 1 ? "" : "s", given, were);
}

static void missing(const Binder *self, PyObject *values, Py_ssize_t from)
{
    Py_ssize_t end = from < self->placed ? self->placed : PyTuple_GET_SIZE(values);
    PyObject *names = PyList_New(0);
    for (Py_ssize_t i = from; names != NULL && i < end; i++) {
        if (PyTuple_GET_ITEM(values, i) != NULL || PyTuple_GET_ITEM(self->defaults, i) != self->empty)
            continue;
        PyObject *name = PyObject_Repr(PyTuple_GET_ITEM(self->names, i));
        if (name == NULL || PyList_Append(names, name) < 0)
            Py_CLEAR(names);
        Py_XDECREF(name);
    }
    PyObject *comma = names == NULL ? NULL : PyUnicode_FromString(", ");
    PyObject *text = comma == NULL ? NULL : PyUnicode_Join(comma, names);
    if (text != NULL)
        PyErr_Format(
            PyExc_TypeError, "missing %zd required %s argument%s: %U", PyList_GET_SIZE(names),
            from < self->placed ? "positional" : "keyword-only", PyList_GET_SIZE(names) == 1 ? "" : "s", text);
    Py_XDECREF(text);
    Py_XDECREF(comma);
    Py_XDECREF(names);
}

/* Arguments given by position go to the first parameters, what is left over to ``*args``: 0, or -1. */
static int bind_placed(const Binder *self, PyObject *values, PyObject *const *args, Py_ssize_t given)
{
    Py_ssize_t taken = given < self->placed ? given : self->placed;
    for (Py_ssize_t i = 0; i < taken; i++)
        PyTuple_SET_ITEM(values, i, Py_NewRef(args[i]));
    if (self->star < 0) {
        if (given > taken)
            too_many(self, given);
        return given > taken ? -1 : 0;
    }
    PyObject *rest = PyTuple_New(given - taken);
    if (rest == NULL)
        return -1;
    for (Py_ssize_t i = taken; i < given; i++)
        PyTuple_SET_ITEM(rest, i - taken, Py_NewRef(args[i]));
    PyTuple_SET_ITEM(values, self->star, rest);
    return 0;
}

/* One argument given by name goes to its parameter, or to ``**kwargs``: 0, or -1. */
static int bind_named(const Binder *self, PyObject *values, PyObject *keyword, PyObject *value)
{
    Py_ssize_t at = place_of(self, keyword);
    if (at == -2)
        return -1;
    if (at >= 0 && PyTuple_GET_ITEM(values, at) == NULL) {
        PyTuple_SET_ITEM(values, at, Py_NewRef(value));
        return 0;
    }
    if (at < 0 && self->stars >= 0)
        return PyDict_SetItem(PyTuple_GET_ITEM(values, self->stars), keyword, value);
    PyErr_Format(
        PyExc_TypeError, at < 0 ? "got an unexpected keyword argument %R" : "got multiple values for argument %R", keyword);
    return -1;
}

/* What was not given is the very object that is its default: 0, or -1. */
static int bind_defaults(const Binder *self, PyObject *values)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(values); i++) {
        if (PyTuple_GET_ITEM(values, i) != NULL)
            continue;
        PyObject *value = PyTuple_GET_ITEM(self->defaults, i);
        if (value == self->empty) {
            missing(self, values, i);
            return -1;
        }
        PyTuple_SET_ITEM(values, i, Py_NewRef(value));
    }
    return 0;
}

static PyObject *binder_values(PyObject *object, PyObject *const *args, size_t nargsf, PyObject *keywords)
{
    const Binder *self = (const Binder *)object;
    Py_ssize_t given = PyVectorcall_NARGS(nargsf), named = keywords == NULL ? 0 : PyTuple_GET_SIZE(keywords);
    PyObject *values = PyTuple_New(PyTuple_GET_SIZE(self->names));
    if (values == NULL)
        return NULL;
    int failed = bind_placed(self, values, args, given) < 0;
    if (!failed && self->stars >= 0) {
        PyObject *others = PyDict_New();
        failed = others == NULL;
        PyTuple_SET_ITEM(values, self->stars, others);
    }
    for (Py_ssize_t i = 0; i < named && !failed; i++)
        failed = bind_named(self, values, PyTuple_GET_ITEM(keywords, i), args[given + i]) < 0;
    if (failed || bind_defaults(self, values) < 0)
        Py_CLEAR(values);
    return values;
}

/* A call with what ``*args`` and ``**kwargs`` took up spread out again. */
static PyObject *call_spread(const Binder *self, PyObject *function, PyObject *values)
{
    PyObject *args = PyTuple_GetSlice(values, 0, self->placed), *keywords = NULL, *result = NULL;
    if (args != NULL && self->star >= 0) {
        PyObject *rest = PySequence_Tuple(PyTuple_GET_ITEM(values, self->star));
        Py_SETREF(args, rest == NULL ? NULL : PySequence_Concat(args, rest));
        Py_XDECREF(rest);
    }
    int failed = args == NULL || (keywords = PyDict_New()) == NULL;
    Py_ssize_t first = self->placed + (self->star >= 0);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(self->by_name) && !failed; i++) {
        PyObject *value = PyTuple_GET_ITEM(values, first + i);
        failed = PyDict_SetItem(keywords, PyTuple_GET_ITEM(self->by_name, i), value) < 0;
    }
    if (!failed && self->stars >= 0)
        failed = PyDict_Update(keywords, PyTuple_GET_ITEM(values, self->stars)) < 0;
    if (!failed)
        result = PyObject_Call(function, args, keywords);
    Py_XDECREF(args);
    Py_XDECREF(keywords);
    return result;
}

static PyObject *binder_call(PyObject *object, PyObject *const *args, Py_ssize_t count)
{
    const Binder *self = (const Binder *)object;
    if (count != 2 || !PyTuple_Check(args[1]) || PyTuple_GET_SIZE(args[1]) != PyTuple_GET_SIZE(self->names)) {
        PyErr_SetString(PyExc_TypeError, "a function and a tuple with a value for each parameter");
        return NULL;
    }
    if (self->star >= 0 || self->stars >= 0)
        return call_spread(self, args[0], args[1]);
    return PyObject_Vectorcall(args[0], &PyTuple_GET_ITEM(args[1], 0), (size_t)self->placed, self->by_name);
}

/* Where parameters of each kind begin: 0, or -1 with an exception set. */
static int sort_kinds(PyObject *kinds, Py_ssize_t begins[KINDS + 1])
{
    long latest = -1;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(kinds); i++) {
        long kind = PyLong_AsLong(PyTuple_GET_ITEM(kinds, i));
        if (kind == -1 && PyErr_Occurred())
            return -1;
        if (kind < 0 || kind >= KINDS || kind < latest || (kind == latest && (kind == STAR || kind == STARS))) {
            PyErr_SetString(PyExc_ValueError, "parameters in the order of their kinds, and one that is variadic each");
            return -1;
        }
        while (latest < kind)
            begins[++latest] = i;
    }
    while (latest < KINDS)
        begins[++latest] = PyTuple_GET_SIZE(kinds);
    return 0;
}

/* A tuple of the same names, interned, or NULL with an exception set. */
static PyObject *interned(PyObject *names)
{
    PyObject *found = PyTuple_New(PyTuple_GET_SIZE(names));
    for (Py_ssize_t i = 0; found != NULL && i < PyTuple_GET_SIZE(names); i++) {
        PyObject *name = PyTuple_GET_ITEM(names, i);
        if (!PyUnicode_Check(name)) {
            PyErr_SetString(PyExc_TypeError, "names are text");
            Py_DECREF(found);
            return NULL;
        }
        Py_INCREF(name);
        PyUnicode_InternInPlace(&name);
        PyTuple_SET_ITEM(found, i, name);
    }
    return found;
}

static int binder_traverse(PyObject *object, visitproc visit, void *arg)
{
    const Binder *self = (const Binder *)object;
    Py_VISIT(self->names);
    Py_VISIT(self->defaults);
    Py_VISIT(self->empty);
    Py_VISIT(self->by_name);
    return 0;
}

/* Nothing is cleared to break a cycle, as in a tuple: what refers to a binder and is one of its defaults was there
   before it, so that a cycle has another member, which changed since. */
static void binder_dealloc(PyObject *object)
{
    Binder *self = (Binder *)object;
    PyObject_GC_UnTrack(object);
    Py_XDECREF(self->names);
    Py_XDECREF(self->defaults);
    Py_XDECREF(self->empty);
    Py_XDECREF(self->by_name);
    Py_TYPE(object)->tp_free(object);
}

static PyObject *binder_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *names, *kinds, *defaults, *empty;
    static char *known[] = {"names", "kinds", "defaults", "empty", NULL};
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "O!O!O!O", known, &PyTuple_Type, &names, &PyTuple_Type, &kinds, &PyTuple_Type, &defaults, &empty))
        return NULL;
    Py_ssize_t count = PyTuple_GET_SIZE(names), begins[KINDS + 1];
    if (PyTuple_GET_SIZE(kinds) != count || PyTuple_GET_SIZE(defaults) != count) {
        PyErr_SetString(PyExc_ValueError, "a name, a kind and a default for each parameter");
        return NULL;
    }
    if (sort_kinds(kinds, begins) < 0)
        return NULL;
    Binder *self = (Binder *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->first = begins[EITHER_WAY];
    self->placed = begins[STAR];
    self->star = begins[STAR] < begins[ONLY_BY_NAME] ? begins[STAR] : -1;
    self->stars = begins[STARS] < count ? begins[STARS] : -1;
    self->defaults = Py_NewRef(defaults);
    self->empty = Py_NewRef(empty);
    self->names = interned(names);
    self->by_name = self->names == NULL ? NULL : PyTuple_GetSlice(self->names, begins[ONLY_BY_NAME], begins[STARS]);
    self->vectorcall = binder_values;
    if (self->by_name == NULL)
        Py_CLEAR(self);
    return (PyObject *)self;
}

static PyMethodDef binder_methods[] = {
    {"call", (PyCFunction)(void (*)(void))binder_call, METH_FASTCALL, "Call a function with bound values as a caller would."},
    {NULL},
};

static PyTypeObject BinderType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "capture.native._native.Binder",
    .tp_doc = "Called as a function of one signature: the values of all parameters, in their order.",
    .tp_basicsize = sizeof(Binder),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(Binder, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_new = binder_new,
    .tp_dealloc = binder_dealloc,
    .tp_traverse = binder_traverse,
    .tp_methods = binder_methods,
};

int add_binder(PyObject *module)
{
    if (PyType_Ready(&BinderType) < 0)
        return -1;
    return PyModule_AddObjectRef(module, "Binder", (PyObject *)&BinderType);
}
