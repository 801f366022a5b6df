/* Facts: what Python state a recording relies on, each fact one look at a container, an attribute or a function. */
#include "native.h"

#include <string.h>

enum { ITEM, ABSENT, SIZE, ITEMS, ATTRIBUTE, GIVES, BELOW, BELOW_ANY, CELL, ARGUMENT, APART };
#define WEAK 16   /* more to a kind: what is expected is what a weak reference refers to, of the class it has */
#define TENSOR 48 /* and it needs a gradient, or not, as it does */

typedef struct {
    int kind;
    PyObject *holder;   /* the container, the object, the function, or a weak reference */
    PyObject *key;      /* in it; for ``BELOW`` in the ``__dict__`` of what it refers to */
    PyObject *expected; /* this very object, or a plain value; for ``APART`` bytes: where pieces of memory begin and end */
    PyObject *type;     /* of what a weak ``expected`` refers to; else NULL */
    int needs;          /* whether that needs a gradient; -1: it is no tensor */
    uint64_t number;    /* size or address; of an item in a dict its key's hash: that of a tensor is a call of Python */
    uint64_t version;   /* of the dict that the fact is about when it was found to hold; 0: none */
} Fact;

typedef struct {
    PyObject_HEAD
    Py_ssize_t count;
    Fact *facts;
    PyObject *tensors; /* Tensors, or None */
    vectorcallfunc vectorcall;
} Facts;

static PyTypeObject FactsType;
static PyObject *s_dict, *s_requires_grad;

int is_facts(PyObject *one)
{
    return Py_TYPE(one) == &FactsType;
}

/* A dict that is looked into as dicts are, a ``defaultdict`` among them. */
static int is_dict(PyObject *holder)
{
    return PyDict_Check(holder) && Py_TYPE(holder)->tp_as_mapping->mp_subscript == PyDict_Type.tp_as_mapping->mp_subscript;
}

#ifdef __GNUC__
#pragma GCC diagnostic ignored "-Wdeprecated-declarations" /* 3.12 says of the version that it will go, as it did */
#endif

/* A number that no two states of any dict share, as long as Python has it; else 0. */
static uint64_t version_of(const Fact *fact)
{
#if PY_VERSION_HEX < 0x030D0000
    if (fact->kind <= ITEMS && is_dict(fact->holder))
        return ((PyDictObject *)fact->holder)->ma_version_tag;
#endif
    (void)fact;
    return 0;
}

/* What is in a container, a new reference; NULL, with an exception or without one. */
static PyObject *item_of(const Fact *fact)
{
    if (!is_dict(fact->holder))
        return PyObject_GetItem(fact->holder, fact->key);
#if PY_VERSION_HEX < 0x030D0000 /* declared up to 3.12 */
    return Py_XNewRef(_PyDict_GetItem_KnownHash(fact->holder, fact->key, (Py_hash_t)fact->number));
#else
    return Py_XNewRef(PyDict_GetItemWithError(fact->holder, fact->key));
#endif
}

static PyObject *below(const Fact *fact)
{
    PyObject *referent = PyObject_CallNoArgs(fact->holder);
    PyObject *own = referent == NULL ? NULL : PyObject_GetAttr(referent, s_dict);
    PyObject *found = own == NULL || !PyDict_Check(own) ? NULL : Py_XNewRef(PyDict_GetItemWithError(own, fact->key));
    Py_XDECREF(own);
    Py_XDECREF(referent);
    return found;
}

int same_value(PyObject *one, PyObject *other)
{
    if (one == other)
        return 1;
    if (Py_TYPE(one) != Py_TYPE(other))
        return 0;
    if (PyFloat_CheckExact(one)) { /* not by ``==``: two zeros are others, and one NaN is itself */
        double a = PyFloat_AS_DOUBLE(one), b = PyFloat_AS_DOUBLE(other);
        return memcmp(&a, &b, sizeof(a)) == 0;
    }
    const char *name = Py_TYPE(one)->tp_name;
    if (PyLong_CheckExact(one) || PyUnicode_CheckExact(one) || PyBytes_CheckExact(one) ||
        strcmp(name, "torch.Size") == 0 || strcmp(name, "torch.device") == 0)
        return PyObject_RichCompareBool(one, other, Py_EQ);
    return 0;
}

/* What a fact found is what it expects: 1, 0, -1. */
static int is_expected(const Fact *fact, PyObject *found)
{
    if (fact->type == NULL)
        return same_value(found, fact->expected);
    if (found != referent_of(fact->expected) || (PyObject *)Py_TYPE(found) != fact->type)
        return 0;
    if (fact->needs < 0)
        return 1;
    int needs = truth_of(PyObject_GetAttr(found, s_requires_grad));
    return needs < 0 ? -1 : needs == fact->needs;
}

/* ``overlap_any``, denied: an argument shares no memory with any of the pieces. */
static int is_apart(const Fact *fact, uint64_t address)
{
    const uint64_t *pieces = (const uint64_t *)PyBytes_AS_STRING(fact->expected);
    size_t low = 0, high = (size_t)PyBytes_GET_SIZE(fact->expected) / (2 * sizeof(*pieces));
    while (low < high) { /* the first piece that begins behind the argument */
        size_t middle = (low + high) / 2;
        if (pieces[2 * middle] < address + fact->number)
            low = middle + 1;
        else
            high = middle;
    }
    return fact->number == 0 || low == 0 || pieces[2 * low - 1] <= address;
}

/* A dict has none of the names in ``key``, and the pairs of name and value in ``expected``: 1, 0, -1. */
static int has_items(const Fact *fact)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(fact->key); i++) {
        int inside = PyDict_Contains(fact->holder, PyTuple_GET_ITEM(fact->key, i));
        if (inside)
            return inside < 0 ? -1 : 0;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(fact->expected); i++) {
        PyObject *pair = PyTuple_GET_ITEM(fact->expected, i);
        PyObject *found = Py_XNewRef(PyDict_GetItemWithError(fact->holder, PyTuple_GET_ITEM(pair, 0)));
        if (found == NULL)
            return PyErr_Occurred() ? -1 : 0;
        int same = same_value(found, PyTuple_GET_ITEM(pair, 1));
        Py_DECREF(found);
        if (same <= 0)
            return same;
    }
    return 1;
}

static int are_items(PyObject *holder, PyObject *absent, PyObject *pairs)
{
    if (!is_dict(holder) || !PyTuple_Check(absent) || !PyTuple_Check(pairs))
        return 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(pairs); i++) {
        PyObject *pair = PyTuple_GET_ITEM(pairs, i);
        if (!PyTuple_Check(pair) || PyTuple_GET_SIZE(pair) != 2)
            return 0;
    }
    return 1;
}

static int holds(const Fact *fact, const uint64_t *addresses, Py_ssize_t count)
{
    PyObject *found = NULL;
    switch (fact->kind) {
    case ITEM:
        found = item_of(fact);
        break;
    case ABSENT: {
        int inside = PyDict_Contains(fact->holder, fact->key);
        return inside < 0 ? -1 : !inside;
    }
    case SIZE: {
        Py_ssize_t size = PyObject_Size(fact->holder);
        return size < 0 ? -1 : (uint64_t)size == fact->number;
    }
    case ITEMS:
        return has_items(fact);
    case ATTRIBUTE:
        found = PyObject_GetAttr(fact->holder, fact->key);
        break;
    case GIVES:
        found = PyObject_CallNoArgs(fact->holder);
        break;
    case BELOW:
        found = below(fact);
        break;
    case BELOW_ANY: {
        found = below(fact);
        int any = found != NULL && found != Py_None;
        Py_XDECREF(found);
        return found == NULL && PyErr_Occurred() ? -1 : any;
    }
    case CELL:
        found = Py_XNewRef(PyCell_GET(fact->holder));
        break;
    default: {
        Py_ssize_t position = PyLong_AsSsize_t(fact->key);
        if (position < 0 || position >= count)
            return PyErr_Occurred() ? -1 : 0;
        return fact->kind == APART ? is_apart(fact, addresses[position]) : addresses[position] == fact->number;
    }
    }
    if (found == NULL)
        return PyErr_Occurred() ? -1 : 0;
    int same = is_expected(fact, found);
    Py_DECREF(found);
    return same;
}

int facts_hold(PyObject *object, const uint64_t *addresses, Py_ssize_t count)
{
    Facts *self = (Facts *)object;
    for (Py_ssize_t i = 0; i < self->count; i++) {
        Fact *fact = &self->facts[i];
        uint64_t version = version_of(fact);
        int one, known = version != 0 && version == fact->version;
        if (known && fact->type == NULL)
            continue;
        one = known ? is_expected(fact, (PyObject *)referent_of(fact->expected)) : holds(fact, addresses, count);
        if (one < 0)
            PyErr_Clear(); /* what is gone has changed: the check in Python says what it is */
        if (one <= 0)
            return 0;
        fact->version = version; /* a look-up may run Python, which changes the dict: then the number is an old one */
    }
    return self->tensors == Py_None || tensors_hold(self->tensors);
}

static PyObject *facts_call(PyObject *self, PyObject *const *args, size_t nargsf, PyObject *names)
{
    Py_ssize_t count = PyVectorcall_NARGS(nargsf);
    uint64_t addresses[MOST_VALUES];
    if (names != NULL || count > MOST_VALUES) {
        PyErr_SetString(PyExc_TypeError, "facts take tensors alone");
        return NULL;
    }
    for (Py_ssize_t i = 0; i < count; i++)
        if (address_of(args[i], &addresses[i]) < 0)
            return NULL;
    return PyBool_FromLong(facts_hold(self, addresses, count));
}

static int facts_traverse(PyObject *object, visitproc visit, void *arg)
{
    Facts *self = (Facts *)object;
    for (Py_ssize_t i = 0; i < self->count; i++) {
        Py_VISIT(self->facts[i].holder);
        Py_VISIT(self->facts[i].key);
        Py_VISIT(self->facts[i].expected);
        Py_VISIT(self->facts[i].type);
    }
    Py_VISIT(self->tensors);
    return 0;
}

static int facts_clear(PyObject *object)
{
    Facts *self = (Facts *)object;
    while (self->count) {
        Fact fact = self->facts[--self->count];
        Py_DECREF(fact.holder);
        Py_DECREF(fact.key);
        Py_DECREF(fact.expected);
        Py_XDECREF(fact.type);
    }
    return 0;
}

static void facts_dealloc(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    facts_clear(self);
    Py_XDECREF(((Facts *)self)->tensors);
    PyMem_Free(((Facts *)self)->facts);
    Py_TYPE(self)->tp_free(self);
}

static int fact_of(PyObject *given, Fact *fact)
{
    unsigned long long number;
    if (!PyArg_ParseTuple(given, "iOOOK", &fact->kind, &fact->holder, &fact->key, &fact->expected, &number))
        return -1;
    int weak = fact->kind & TENSOR;
    fact->kind &= ~TENSOR;
    int odd = fact->kind < ITEM || fact->kind > APART || (weak && !PyWeakref_Check(fact->expected)) ||
              (fact->kind == CELL && !PyCell_Check(fact->holder)) || (fact->kind == ABSENT && !PyDict_Check(fact->holder)) ||
              (fact->kind == ITEMS && !are_items(fact->holder, fact->key, fact->expected)) ||
              (fact->kind >= ARGUMENT && !PyLong_Check(fact->key)) ||
              (fact->kind == APART && !PyBytes_Check(fact->expected));
    if (odd) {
        PyErr_SetString(PyExc_ValueError, "no such fact");
        return -1;
    }
    if (fact->kind == ITEM && is_dict(fact->holder)) {
        Py_hash_t hash = PyObject_Hash(fact->key);
        if (hash == -1)
            return -1;
        number = (unsigned long long)hash;
    }
    fact->number = number;
    fact->version = 0;
    fact->needs = -1;
    fact->type = NULL;
    if (weak == TENSOR) {
        PyObject *tensor = Py_NewRef((PyObject *)referent_of(fact->expected));
        fact->needs = truth_of(PyObject_GetAttr(tensor, s_requires_grad));
        Py_DECREF(tensor);
        if (fact->needs < 0)
            return -1;
    }
    if (weak)
        fact->type = Py_NewRef((PyObject *)Py_TYPE(referent_of(fact->expected)));
    Py_INCREF(fact->holder);
    Py_INCREF(fact->key);
    Py_INCREF(fact->expected);
    return 0;
}

static PyObject *facts_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"facts", "tensors", NULL};
    PyObject *given, *tensors;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O", names, &PyTuple_Type, &given, &tensors))
        return NULL;
    if (tensors != Py_None && !is_tensors(tensors)) {
        PyErr_SetString(PyExc_TypeError, "these are no tensors");
        return NULL;
    }
    Facts *self = (Facts *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->vectorcall = facts_call;
    self->tensors = Py_NewRef(tensors);
    self->facts = PyMem_New(Fact, PyTuple_GET_SIZE(given) + 1);
    if (self->facts == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(given); i++) {
        if (fact_of(PyTuple_GET_ITEM(given, i), &self->facts[i]) < 0) {
            Py_DECREF(self);
            return NULL;
        }
        self->count = i + 1;
    }
    return (PyObject *)self;
}

static PyTypeObject FactsType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "capture._native.Facts",
    .tp_doc = "Tells whether Python state is as it was, for a call on these tensors.",
    .tp_basicsize = sizeof(Facts),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(Facts, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_new = facts_new,
    .tp_dealloc = facts_dealloc,
    .tp_traverse = facts_traverse,
    .tp_clear = facts_clear,
};

int add_facts(PyObject *module)
{
    s_dict = PyUnicode_InternFromString("__dict__");
    s_requires_grad = PyUnicode_InternFromString("requires_grad");
    if (s_dict == NULL || s_requires_grad == NULL || PyType_Ready(&FactsType) < 0)
        return -1;
    return PyModule_AddObjectRef(module, "Facts", (PyObject *)&FactsType);
}
