/* Guards: what Python state a recording, or the key of a call, relies on: each guard is one condition on one object.

   Python hands over ``Guard`` records once (``guards/guard.py``). Here they are looked at before every replay, at some
   15 ns each. Three things keep that low: a dict that nobody wrote to since has the same version, and is not looked into
   again (``dict_versions.c``); the versions of all dicts lie in one table, so that one look at each tells of all guards
   on it; and of keys the hash is known. A guard keeps its expected object alive, or a weak reference to
   it, as the record does. The tests hold an evaluator in Python that has to give the same verdicts. */
#include "native.h"

#include <stdlib.h>
#include <string.h>

/* How a guard reaches its object: ``Source.kind``. */
typedef enum { AT_ITEM, AT_ATTRIBUTE, AT_CELL, AT_WEAK, AT_CALL, AT_ITSELF, AT_ARGUMENT, AT_SLOT, AT_CONTEXT } Reach;
/* What has to be true of it: ``Guard.kind``. */
typedef enum {
    IS_VALUE,
    IS_OBJECT,
    IS_PRESENT,
    IS_ABSENT,
    HAS_LENGTH,
    HAS_MEMBERS,
    ARE_EMPTY,
    HAS_ADDRESS,
    IS_APART,
    HAS_NAMES,
    IS_TABLE,
    IS_SEQUENCE,
    ARE_FUNCTIONS,
    HAVE_BASES,
    ARE_OF_CLASSES,
    ARE_TOLD
} Kind;
/* What a function or class tells of itself: ``Guard.source.name`` of a guard of the kind ``definitions``. */
typedef enum { ITS_NAME, ITS_QUALNAME, ITS_MODULE, ITS_DOC, TELLS_NOTHING } Told;

typedef struct {
    Version *of_dict;   /* of the dict that the guard is about, kept by ``holder``, where that tells all; else NULL */
    uint64_t version;   /* of that dict when the guard was found to hold; 0: none */
    PyObject *type;     /* of what a weak ``expected`` refers to; else NULL */
    Reach reach;
    Kind kind;
    int verdict;        /* of a replay where this does not hold */
    PyObject *holder;   /* the container, the object, the function, or a weak reference */
    PyObject *key;      /* in it; for AT_WEAK in the ``__dict__`` of what it refers to; the position of an argument; a
                           descriptor for AT_SLOT */
    PyObject *expected; /* what the record expects */
    int needs;          /* whether that requires a gradient; -1: it is no tensor */
    uint64_t number;    /* length, address or bytes; for an item of a dict the hash of its key: hashing a tensor runs
                           Python */
} Guard;

/* A dict, whose version tells of some guards that they hold. */
typedef struct {
    Version *of_dict;
    uint64_t version;    /* when all of them were found to hold; 0: none */
    Py_ssize_t from, to; /* which they are, in ``order`` */
} Table;

typedef struct {
    PyObject_HEAD
    Py_ssize_t count, first; /* ``first``: of those that ask for free memory, which come last, behind the tensors */
    Guard *guards;
    unsigned sorted;   /* 0: ``tables`` and ``order`` are not about the guards as they are now; else which time it is */
    unsigned times;    /* that they were sorted */
    Py_ssize_t num_tables, others; /* ``others``: guards that no version tells of, which come last in ``order`` */
    int may_run;       /* looking at one of those may run Python */
    Table *tables;
    Py_ssize_t *order; /* numbers of guards before ``first``, by their dict, ascending within one */
    PyObject *tensors; /* StaticTensors, another function that tells whether they are as they were, or None */
    vectorcallfunc vectorcall;
} Guards;

/* The arguments of a call: addresses, where they are known, or else the tensors themselves. */
typedef struct {
    const uint64_t *addresses;
    PyObject *const *leaves;
    Py_ssize_t count;
} Arguments;

static PyTypeObject GuardsType;
static PyTypeObject *deque_type; /* collections.deque, for as long as the process lives */
static PyObject *s_dict, *s_requires_grad;

int is_guards(PyObject *one)
{
    return Py_TYPE(one) == &GuardsType;
}

/* A dict that is looked into as dicts are, a ``defaultdict`` among them. */
static int is_dict(PyObject *holder)
{
    return PyDict_Check(holder) && Py_TYPE(holder)->tp_as_mapping->mp_subscript == PyDict_Type.tp_as_mapping->mp_subscript;
}

#ifdef __GNUC__
#pragma GCC diagnostic ignored "-Wdeprecated-declarations" /* 3.12 says of the version that it will go, as it did */
#endif

/* The dict that a class or an instance keeps its attributes in, or the dict itself: borrowed; NULL where there is none. */
static PyObject *dict_behind(PyObject *holder)
{
    if (PyDict_Check(holder))
        return holder;
    if (PyType_Check(holder))
        return ((PyTypeObject *)holder)->tp_dict; /* of classes that Python code made; others never change */
    if (PyWeakref_Check(holder)) {
        PyObject *referent = (PyObject *)referent_of(holder);
        PyObject *own = referent == Py_None ? NULL : PyObject_GenericGetDict(referent, NULL);
        if (own == NULL)
            PyErr_Clear();
        Py_XDECREF(own); /* the object keeps it */
        return own;
    }
    return NULL;
}

/* The version of the dict, or of several, that tells all that the guard asks for, to be given back; else NULL. */
static Version *versioned(const Guard *guard)
{
    PyObject *own = NULL;
    if (guard->kind == ARE_EMPTY)
        return version_of_dicts(guard->holder);
    if (guard->kind == HAS_NAMES)
        own = PyWeakref_Check(guard->holder) ? NULL : dict_behind(guard->holder);
    else if (guard->kind == IS_TABLE)
        own = PyDict_Check(guard->holder) ? guard->holder : NULL;
    else if (guard->kind != IS_SEQUENCE && (guard->reach == AT_ITEM || guard->reach == AT_ITSELF))
        own = is_dict(guard->holder) ? guard->holder : NULL; /* an ``OrderedDict`` has an order beside that of the dict */
    return own == NULL ? NULL : version_of_dict(own);
}

/* The number for what the guard asks for now; 0: nothing tells. */
static uint64_t version_of(const Guard *guard)
{
    if (guard->of_dict != NULL)
        return NUMBER_OF(guard->of_dict);
#if PY_VERSION_HEX < 0x030C0000 /* no other dict ever has the same number, even where the object got another one */
    if (guard->kind == HAS_NAMES && PyWeakref_Check(guard->holder)) {
        const PyObject *own = dict_behind(guard->holder);
        return own == NULL ? 0 : NUMBER_OF((const Version *)own);
    }
#endif
    return 0;
}

/* What is in a container, a new reference; NULL, with an exception or without one. A class that Python code derived may
   do more as a member is looked up: a guard does not. */
static PyObject *item_of(const Guard *guard)
{
    PyObject *holder = guard->holder;
    int is_list = PyList_Check(holder) && !PyList_CheckExact(holder);
    int is_tuple = PyTuple_Check(holder) && !PyTuple_CheckExact(holder);
    if ((is_list || is_tuple) && PyLong_CheckExact(guard->key)) {
        Py_ssize_t at = PyLong_AsSsize_t(guard->key), size = is_list ? PyList_GET_SIZE(holder) : PyTuple_GET_SIZE(holder);
        if (at < 0 || at >= size)
            return NULL;
        return Py_NewRef(is_list ? PyList_GET_ITEM(holder, at) : PyTuple_GET_ITEM(holder, at));
    }
    if (PyLong_CheckExact(guard->key) && PyObject_TypeCheck(holder, deque_type))
        return deque_type->tp_as_sequence->sq_item(holder, PyLong_AsSsize_t(guard->key));
    if (PyDict_Check(holder) && !is_dict(holder))
        return Py_XNewRef(PyDict_GetItemWithError(holder, guard->key));
    if (!is_dict(holder))
        return PyObject_GetItem(holder, guard->key);
#if PY_VERSION_HEX < 0x030D0000 /* declared up to 3.12 */
    return Py_XNewRef(_PyDict_GetItem_KnownHash(guard->holder, guard->key, (Py_hash_t)guard->number));
#else
    return Py_XNewRef(PyDict_GetItemWithError(guard->holder, guard->key));
#endif
}

/* What is in the ``__dict__`` of what a weak reference refers to. */
static PyObject *below(const Guard *guard)
{
    PyObject *own = PyWeakref_CheckRefExact(guard->holder) ? dict_behind(guard->holder) : NULL;
    if (own != NULL)
        return Py_XNewRef(PyDict_GetItemWithError(own, guard->key));
    PyObject *referent = PyObject_CallNoArgs(guard->holder);
    own = referent == NULL ? NULL : PyObject_GetAttr(referent, s_dict);
    PyObject *found = own == NULL || !PyDict_Check(own) ? NULL : Py_XNewRef(PyDict_GetItemWithError(own, guard->key));
    Py_XDECREF(own);
    Py_XDECREF(referent);
    return found;
}

/* What an object, or what a weak reference refers to, keeps in a slot of its class, or NULL, with an exception or
   without one: without a look-up, which runs Python. */
static PyObject *in_slot(const Guard *guard)
{
    PyObject *is_weak = PyWeakref_CheckRefExact(guard->holder) ? guard->holder : NULL;
    PyObject *holder = Py_NewRef(is_weak == NULL ? guard->holder : (PyObject *)referent_of(is_weak));
    int is_gone = is_weak != NULL && holder == Py_None;
    PyObject *found = is_gone ? NULL : Py_TYPE(guard->key)->tp_descr_get(guard->key, holder, (PyObject *)Py_TYPE(holder));
    Py_DECREF(holder);
    return found;
}

/* The value of a context variable in this context; NULL, with an exception or, where it has none, without one. */
static PyObject *in_context(const Guard *guard)
{
    PyObject *found = NULL;
    return PyContextVar_Get(guard->holder, NULL, &found) < 0 ? NULL : found;
}

/* The object that a guard is about, a new reference; NULL where it is gone, with an exception or without one. */
static PyObject *object_of(const Guard *guard)
{
    switch (guard->reach) {
    case AT_ITEM:
        return item_of(guard);
    case AT_ATTRIBUTE:
        return PyObject_GetAttr(guard->holder, guard->key);
    case AT_CELL:
        return Py_XNewRef(PyCell_GET(guard->holder));
    case AT_WEAK:
        return below(guard);
    case AT_CALL:
        return PyObject_CallNoArgs(guard->holder);
    case AT_SLOT:
        return in_slot(guard);
    case AT_CONTEXT:
        return in_context(guard);
    default:
        return Py_NewRef(guard->holder);
    }
}

#define DEEPEST 32 /* tuples in tuples that are compared by their members */

static int same_at(PyObject *one, PyObject *other, int depth)
{
    if (one == other)
        return 1;
    if (Py_TYPE(one) != Py_TYPE(other))
        return 0;
    if (PyFloat_CheckExact(one)) { /* not by ``==``: two zeros are others, and one NaN is itself */
        double a = PyFloat_AS_DOUBLE(one), b = PyFloat_AS_DOUBLE(other);
        return memcmp(&a, &b, sizeof(a)) == 0;
    }
    if (PyComplex_CheckExact(one)) {
        Py_complex a = PyComplex_AsCComplex(one), b = PyComplex_AsCComplex(other);
        return memcmp(&a, &b, sizeof(a)) == 0;
    }
    if (PyTuple_Check(one)) {
        int same = depth < DEEPEST && PyTuple_GET_SIZE(one) == PyTuple_GET_SIZE(other);
        for (Py_ssize_t i = 0; same > 0 && i < PyTuple_GET_SIZE(one); i++)
            same = same_at(PyTuple_GET_ITEM(one, i), PyTuple_GET_ITEM(other, i), depth + 1);
        return same;
    }
    if (PyLong_CheckExact(one) || PyUnicode_CheckExact(one) || PyBytes_CheckExact(one) ||
        strcmp(Py_TYPE(one)->tp_name, "torch.device") == 0)
        return PyObject_RichCompareBool(one, other, Py_EQ);
    return 0;
}

int same_value(PyObject *one, PyObject *other)
{
    return same_at(one, other, 0);
}

/* The object is what is expected: 1, 0, -1. */
static int is_expected(const Guard *guard, PyObject *found)
{
    if (guard->kind == IS_PRESENT)
        return found != Py_None;
    if (guard->type == NULL)
        return same_value(found, guard->expected);
    PyObject *reference = PyTuple_GET_ITEM(guard->expected, 0);
    if ((PyObject *)Py_TYPE(found) != guard->type || (reference != Py_None && found != referent_of(reference)))
        return 0;
    if (guard->needs < 0)
        return 1;
    int needs = truth_of(PyObject_GetAttr(found, s_requires_grad));
    return needs < 0 ? -1 : needs == guard->needs;
}

/* An argument shares no memory with any of the pieces that the call reads where they are. */
static int is_apart(const Guard *guard, uint64_t address)
{
    PyObject *bytes = PyTuple_GET_ITEM(guard->expected, 1);
    const uint64_t *pieces = (const uint64_t *)PyBytes_AS_STRING(bytes);
    size_t low = 0, high = (size_t)PyBytes_GET_SIZE(bytes) / (2 * sizeof(*pieces));
    while (low < high) { /* the first piece that begins behind the argument */
        size_t middle = (low + high) / 2;
        if (pieces[2 * middle] < address + guard->number)
            low = middle + 1;
        else
            high = middle;
    }
    return guard->number == 0 || low == 0 || pieces[2 * low - 1] <= address;
}

static PyObject *stand_ins; /* what torch's attributes are while a body is watched: ``id`` -> what was there before, if
                               anything was, in a tuple */

/* What was in a place of a dict before a body was watched: what is there, where nothing stands in for it. Borrowed; NULL:
   nothing was there, or there is an exception. */
static PyObject *seen_through(PyObject *found)
{
    if (found == NULL || PyDict_GET_SIZE(stand_ins) == 0)
        return found;
    PyObject *number = PyLong_FromVoidPtr(found);
    PyObject *before = number == NULL ? NULL : PyDict_GetItemWithError(stand_ins, number);
    Py_XDECREF(number);
    if (before == NULL)
        return PyErr_Occurred() ? NULL : found;
    return PyTuple_Check(before) && PyTuple_GET_SIZE(before) ? PyTuple_GET_ITEM(before, 0) : NULL;
}

/* A dict has none of some names, and these pairs of name and value: 1, 0, -1. */
static int has_members(const Guard *guard)
{
    PyObject *absent = PyTuple_GET_ITEM(guard->expected, 0), *pairs = PyTuple_GET_ITEM(guard->expected, 1);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(absent); i++) {
        if (seen_through(PyDict_GetItemWithError(guard->holder, PyTuple_GET_ITEM(absent, i))) != NULL)
            return 0;
        if (PyErr_Occurred())
            return -1;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(pairs); i++) {
        PyObject *pair = PyTuple_GET_ITEM(pairs, i);
        PyObject *found = Py_XNewRef(seen_through(PyDict_GetItemWithError(guard->holder, PyTuple_GET_ITEM(pair, 0))));
        if (found == NULL)
            return PyErr_Occurred() ? -1 : 0;
        int same = same_value(found, PyTuple_GET_ITEM(pair, 1));
        Py_DECREF(found);
        if (same <= 0)
            return same;
    }
    return 1;
}

/* A member is what is expected: of a class, or where that is None the very value. 1, 0, -1. */
static int is_member(PyObject *found, PyObject *value, PyObject *kind)
{
    return kind == Py_None ? same_value(found, value) : (PyObject *)Py_TYPE(found) == kind;
}

/* As ``has_names``, in one pass, for a dict whose members are in the order in which they were found: 1, -1; 0 where
   only ``has_names`` can tell. */
static int has_names_in_order(const Guard *guard, PyObject *own)
{
    PyObject *names = PyTuple_GET_ITEM(guard->expected, 0), *there = PyTuple_GET_ITEM(guard->expected, 1);
    PyObject *values = PyTuple_GET_ITEM(guard->expected, 2), *kinds = PyTuple_GET_ITEM(guard->expected, 3);
    PyObject *key, *value;
    Py_ssize_t found = 0, count = PyTuple_GET_SIZE(there), at = 0;
    while (PyDict_Next(own, &at, &key, &value)) {
        int fits;
        if (found < count && key == PyTuple_GET_ITEM(there, found)) {
            fits = is_member(value, PyTuple_GET_ITEM(values, found), PyTuple_GET_ITEM(kinds, found));
            found++;
        } else {
            int inside = PyUnicode_CheckExact(key) ? PySet_Contains(names, key) : 0;
            fits = inside < 0 ? -1 : !inside;
        }
        if (fits <= 0)
            return fits;
    }
    return found == count;
}

/* Of some names, a dict has some with what is expected, and none of the others: 1, 0, -1. */
static int has_names(const Guard *guard)
{
    PyObject *names = PyTuple_GET_ITEM(guard->expected, 0), *there = PyTuple_GET_ITEM(guard->expected, 1);
    PyObject *values = PyTuple_GET_ITEM(guard->expected, 2), *kinds = PyTuple_GET_ITEM(guard->expected, 3);
    PyObject *own = dict_behind(guard->holder), *key, *value;
    Py_ssize_t count = 0, at = 0;
    int in_order = own == NULL ? 0 : has_names_in_order(guard, own);
    if (own == NULL || in_order)
        return in_order;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(there); i++) {
        PyObject *found = seen_through(PyDict_GetItemWithError(own, PyTuple_GET_ITEM(there, i)));
        if (found == NULL)
            return PyErr_Occurred() ? -1 : 0;
        int same = is_member(found, PyTuple_GET_ITEM(values, i), PyTuple_GET_ITEM(kinds, i));
        if (same <= 0)
            return same;
    }
    while (PyDict_Next(own, &at, &key, &value)) { /* one of the names may be new */
        int inside = PyUnicode_CheckExact(key) ? PySet_Contains(names, key) : 0;
        if (inside < 0)
            return -1;
        if (inside && seen_through(value) == NULL) {
            if (PyErr_Occurred())
                return -1;
            inside = 0;
        }
        count += inside;
    }
    return count == PyTuple_GET_SIZE(there);
}

/* A dict has these members, in this order: 1, 0, -1. */
static int is_table(const Guard *guard)
{
    PyObject *keys = PyTuple_GET_ITEM(guard->expected, 0), *values = PyTuple_GET_ITEM(guard->expected, 1);
    PyObject *kinds = PyTuple_GET_ITEM(guard->expected, 2), *key, *value;
    Py_ssize_t at = 0;
    if (PyDict_GET_SIZE(guard->holder) != PyTuple_GET_SIZE(keys))
        return 0;
    for (Py_ssize_t i = 0; PyDict_Next(guard->holder, &at, &key, &value); i++) {
        int same = same_value(key, PyTuple_GET_ITEM(keys, i));
        if (same > 0)
            same = is_member(value, PyTuple_GET_ITEM(values, i), PyTuple_GET_ITEM(kinds, i));
        if (same <= 0)
            return same;
    }
    return 1;
}

/* The members of what is no list are these, in the order that its ``type`` gives, which is no class of a user's. 1, 0, -1. */
static int gives(PyObject *container, const PyTypeObject *type, PyObject *values, PyObject *kinds)
{
    PyObject *iterator = type->tp_iter(container), *found;
    Py_ssize_t count = PyTuple_GET_SIZE(values), i = 0;
    int same = iterator == NULL ? -1 : 1;
    while (same > 0 && (found = PyIter_Next(iterator)) != NULL) {
        same = i < count ? is_member(found, PyTuple_GET_ITEM(values, i), PyTuple_GET_ITEM(kinds, i)) : 0;
        i++;
        Py_DECREF(found);
    }
    Py_XDECREF(iterator);
    return same <= 0 ? same : PyErr_Occurred() ? -1 : i == count;
}

/* A list, set or deque has these members: 1, 0, -1. */
static int is_sequence(const Guard *guard)
{
    PyObject *values = PyTuple_GET_ITEM(guard->expected, 0), *kinds = PyTuple_GET_ITEM(guard->expected, 1);
    PyObject *list = guard->holder;
    if (!PyList_Check(list))
        return gives(list, (PyTypeObject *)guard->key, values, kinds);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(values); i++) {
        int same = PyList_GET_SIZE(list) != PyTuple_GET_SIZE(values)
                       ? 0
                       : is_member(PyList_GET_ITEM(list, i), PyTuple_GET_ITEM(values, i), PyTuple_GET_ITEM(kinds, i));
        if (same <= 0)
            return same;
    }
    return PyList_GET_SIZE(list) == PyTuple_GET_SIZE(values);
}

/* Functions have the code and the defaults that they had: 1, 0. */
static int are_functions(const Guard *guard)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(guard->holder); i++) {
        PyObject *function = PyTuple_GET_ITEM(guard->holder, i), *defaults = PyFunction_GET_DEFAULTS(function);
        PyObject *named = PyFunction_GET_KW_DEFAULTS(function);
        if (PyFunction_GET_CODE(function) != PyTuple_GET_ITEM(guard->expected, 3 * i) ||
            (defaults == NULL ? Py_None : defaults) != PyTuple_GET_ITEM(guard->expected, 3 * i + 1) ||
            (named == NULL ? Py_None : named) != PyTuple_GET_ITEM(guard->expected, 3 * i + 2))
            return 0;
    }
    return 1;
}

/* Classes look names up in the order that they had: 1, 0. */
static int have_bases(const Guard *guard)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(guard->holder); i++)
        if (((PyTypeObject *)PyTuple_GET_ITEM(guard->holder, i))->tp_mro != PyTuple_GET_ITEM(guard->expected, i))
            return 0;
    return 1;
}

/* What a function or class keeps of this kind in C; None where it keeps nothing, or nothing that can change. Borrowed. */
static PyObject *told_by(PyObject *definition, Told what)
{
    PyObject *found = NULL;
    if (PyFunction_Check(definition)) {
        PyFunctionObject *function = (PyFunctionObject *)definition;
        found = what == ITS_NAME       ? function->func_name
                : what == ITS_QUALNAME ? function->func_qualname
                : what == ITS_MODULE   ? function->func_module
                                       : function->func_doc;
    } else if (PyType_HasFeature((PyTypeObject *)definition, Py_TPFLAGS_HEAPTYPE)) {
        PyHeapTypeObject *kind = (PyHeapTypeObject *)definition;
        found = what == ITS_NAME ? kind->ht_name : what == ITS_QUALNAME ? kind->ht_qualname : NULL;
    }
    return found == NULL ? Py_None : found;
}

/* Functions and classes tell of themselves what they told: 1, 0. Another text of the same letters is the same. */
static int are_told(const Guard *guard)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(guard->holder); i++) {
        PyObject *before = PyTuple_GET_ITEM(guard->expected, i);
        PyObject *now = told_by(PyTuple_GET_ITEM(guard->holder, i), (Told)guard->number);
        if (now != before &&
            !(PyUnicode_CheckExact(now) && PyUnicode_CheckExact(before) && PyUnicode_Compare(now, before) == 0))
            return 0;
    }
    return 1;
}

/* Objects, held weakly where they can be, are of the classes that they were of, and have the dicts that they had: 1, 0. */
static int are_of_classes(const Guard *guard)
{
    PyObject *kinds = PyTuple_GET_ITEM(guard->expected, 0), *dicts = PyTuple_GET_ITEM(guard->expected, 1);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(guard->holder); i++) {
        PyObject *one = PyTuple_GET_ITEM(guard->holder, i), *dict = PyTuple_GET_ITEM(dicts, i);
        if (PyWeakref_Check(one))
            one = (PyObject *)referent_of(one);
        if ((PyObject *)Py_TYPE(one) != PyTuple_GET_ITEM(kinds, i))
            return 0;
        PyObject **own = dict == Py_None ? NULL : _PyObject_GetDictPtr(one);
        if (dict != Py_None && (own == NULL || *own != dict))
            return 0;
    }
    return 1;
}

/* Nothing is in any of these containers: 1, 0, -1. */
static int are_empty(const Guard *guard)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(guard->holder); i++) {
        PyObject *one = PyTuple_GET_ITEM(guard->holder, i);
        Py_ssize_t length = PyDict_Check(one) ? PyDict_GET_SIZE(one) : PyObject_Size(one); /* others are of Python's */
        if (length)
            return length < 0 ? -1 : 0;
    }
    return 1;
}

/* The address of the argument is the one, or lies apart: 1, 0, -1. */
static int argument_holds(const Guard *guard, const Arguments *arguments)
{
    Py_ssize_t position = PyLong_AsSsize_t(guard->key);
    uint64_t address;
    if (position < 0 || position >= arguments->count) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_IndexError, "the call has fewer arguments");
        return -1;
    }
    if (arguments->addresses != NULL)
        address = arguments->addresses[position];
    else if (address_of(arguments->leaves[position], &address) < 0)
        return -1;
    return guard->kind == IS_APART ? is_apart(guard, address) : address == guard->number;
}

/* The guard holds: 1, 0; -1 where its object is gone, with an exception or without one. */
static int holds(const Guard *guard, const Arguments *arguments)
{
    switch (guard->kind) {
    case IS_ABSENT: {
        int inside = PyDict_Contains(guard->holder, guard->key);
        return inside < 0 ? -1 : !inside;
    }
    case HAS_LENGTH: {
        Py_ssize_t length = PyObject_Size(guard->holder);
        return length < 0 ? -1 : (uint64_t)length == guard->number;
    }
    case HAS_MEMBERS:
        return has_members(guard);
    case ARE_EMPTY:
        return are_empty(guard);
    case HAS_NAMES:
        return has_names(guard);
    case IS_TABLE:
        return is_table(guard);
    case IS_SEQUENCE:
        return is_sequence(guard);
    case ARE_FUNCTIONS:
        return are_functions(guard);
    case HAVE_BASES:
        return have_bases(guard);
    case ARE_OF_CLASSES:
        return are_of_classes(guard);
    case ARE_TOLD:
        return are_told(guard);
    case HAS_ADDRESS:
    case IS_APART:
        return argument_holds(guard, arguments);
    default: {
        PyObject *found = object_of(guard);
        int same = found == NULL ? -1 : is_expected(guard, found);
        Py_XDECREF(found);
        return same;
    }
    }
}

/* What is gone has changed. Other errors are the caller's: -1. */
static int gone(void)
{
    if (!PyErr_Occurred())
        return CHANGED;
    if (PyErr_ExceptionMatches(PyExc_AttributeError) || PyErr_ExceptionMatches(PyExc_KeyError) ||
        PyErr_ExceptionMatches(PyExc_IndexError) || PyErr_ExceptionMatches(PyExc_ValueError)) {
        PyErr_Clear();
        return CHANGED;
    }
    return -1;
}

/* A verdict, or -1 with an exception set. */
static int verdict_of_one(Guard *guard, const Arguments *arguments)
{
    uint64_t version = version_of(guard);
    int one, known = version != 0 && version == guard->version;
    if (known && guard->type == NULL)
        return HOLDS;
    PyObject *reference = known ? PyTuple_GET_ITEM(guard->expected, 0) : Py_None;
    int verdict = guard->verdict;
    one = reference != Py_None ? is_expected(guard, (PyObject *)referent_of(reference)) : holds(guard, arguments);
    if (one <= 0)
        return one < 0 ? gone() : verdict;
    guard->version = version; /* a look-up may run Python, which changes the dict: then the number is an old one */
    return HOLDS;
}

/* The verdict of the guards from one to another. */
static int verdict_between(Guards *self, Py_ssize_t from, Py_ssize_t to, const Arguments *arguments)
{
    int verdict = HOLDS;
    for (Py_ssize_t i = from; verdict == HOLDS && i < to && i < self->count; i++) /* others may replace guards meanwhile */
        verdict = verdict_of_one(&self->guards[i], arguments);
    return verdict;
}

/* Looking at it runs no Python. */
static int is_quiet(const Guard *guard)
{
    switch (guard->kind) {
    case HAS_NAMES:
    case IS_TABLE:
    case HAS_MEMBERS:
    case ARE_FUNCTIONS:
    case HAVE_BASES:
    case ARE_OF_CLASSES:
    case ARE_TOLD:
        return 1;
    case IS_OBJECT:
        if (guard->needs >= 0) /* a tensor's class may have its own word on that */
            return 0;
        /* fall through */
    case IS_VALUE:
    case IS_PRESENT:
        return guard->reach == AT_CELL || guard->reach == AT_ITSELF || (guard->reach == AT_ITEM && is_dict(guard->holder)) ||
               (guard->reach == AT_WEAK && PyWeakref_CheckRefExact(guard->holder));
    default:
        return 0;
    }
}

static int compare_places(const void *one, const void *other)
{
    const Py_ssize_t *a = one, *b = other; /* pairs of the dict's address and the number of the guard */
    if (a[0] != b[0])
        return (size_t)a[0] < (size_t)b[0] ? -1 : 1;
    return a[1] < b[1] ? -1 : a[1] > b[1];
}

/* Fills ``tables`` and ``order``: 1; 0 without memory. */
static int sort_by_dict(Guards *self)
{
    Py_ssize_t count = self->first, sorted = 0, (*pairs)[2] = PyMem_Malloc((size_t)(count + 1) * sizeof(*pairs));
    Table *tables = PyMem_Realloc(self->tables, (size_t)(count + 1) * sizeof(*tables));
    self->tables = tables == NULL ? self->tables : tables;
    Py_ssize_t *order = PyMem_Realloc(self->order, (size_t)(count + 1) * sizeof(*order));
    self->order = order == NULL ? self->order : order;
    if (pairs == NULL || tables == NULL || order == NULL) {
        PyMem_Free(pairs);
        return 0;
    }
    self->num_tables = self->others = self->may_run = 0;
    for (Py_ssize_t i = 0; i < count; i++)
        if (self->guards[i].of_dict != NULL && self->guards[i].type == NULL) {
            pairs[sorted][0] = (Py_ssize_t)self->guards[i].of_dict;
            pairs[sorted++][1] = i;
        }
    qsort(pairs, (size_t)sorted, sizeof(*pairs), compare_places);
    for (Py_ssize_t i = 0; i < sorted; i++) {
        if (i == 0 || pairs[i][0] != pairs[i - 1][0])
            tables[self->num_tables++] = (Table){(Version *)pairs[i][0], 0, i, i};
        tables[self->num_tables - 1].to++;
        order[i] = pairs[i][1];
    }
    PyMem_Free(pairs);
    for (Py_ssize_t i = 0; i < count; i++)
        if (self->guards[i].of_dict == NULL || self->guards[i].type != NULL) {
            order[sorted + self->others++] = i;
            self->may_run |= !is_quiet(&self->guards[i]);
        }
    self->sorted = ++self->times;
    return 1;
}

/* The version at which all guards of a dict were found to hold; 0: they were looked at at different ones. */
static uint64_t common_version(const Guards *self, const Table *table)
{
    uint64_t version = self->guards[self->order[table->from]].version;
    for (Py_ssize_t i = table->from + 1; i < table->to; i++)
        if (self->guards[self->order[i]].version != version)
            return 0;
    return version;
}

/* How many dicts may have been written to since, of two the second is not looked for; ``*changed``: one of them. */
static int num_changed(const Guards *self, Table **changed)
{
    int count = 0;
    for (Py_ssize_t i = 0; i < self->num_tables && count < 2; i++) {
        Table *table = &self->tables[i];
        if (table->version == 0 || NUMBER_OF(table->of_dict) != table->version) {
            *changed = table;
            count++;
        }
    }
    return count;
}

/* Of the guards that no version tells of and, if one is given, those on a dict, in the order of all. */
static int verdict_of_some(Guards *self, const Table *changed, const Arguments *arguments)
{
    Py_ssize_t i = self->first - self->others, j = changed == NULL ? 0 : changed->from;
    Py_ssize_t to = changed == NULL ? 0 : changed->to;
    int verdict = HOLDS;
    unsigned sorted = self->sorted; /* others may replace guards meanwhile */
    while (verdict == HOLDS && self->sorted == sorted && (i < self->first || j < to)) {
        Py_ssize_t at = j >= to || (i < self->first && self->order[i] < self->order[j]) ? self->order[i++] : self->order[j++];
        verdict = verdict_of_one(&self->guards[at], arguments);
    }
    return verdict;
}

/* The verdict of the guards on Python state. */
static int verdict_of_state(Guards *self, const Arguments *arguments)
{
    Table *changed = NULL;
    if (!self->sorted && !sort_by_dict(self))
        return verdict_between(self, 0, self->first, arguments);
    int count = num_changed(self, &changed);
    unsigned sorted = self->sorted;
    if (count < 2) {
        int verdict = verdict_of_some(self, changed, arguments);
        if (verdict != HOLDS)
            return verdict;
        if (self->sorted == sorted && changed != NULL)
            changed->version = common_version(self, changed);
        Table *another = NULL;
        if (self->sorted == sorted && (!self->may_run || num_changed(self, &another) == 0))
            return HOLDS;
    }
    int verdict = verdict_between(self, 0, self->first, arguments);
    for (Py_ssize_t i = 0; verdict == HOLDS && self->sorted == sorted && i < self->num_tables; i++)
        self->tables[i].version = common_version(self, &self->tables[i]);
    return verdict;
}

/* The tensors are as recorded. */
static int verdict_of_tensors(Guards *self)
{
    if (self->tensors == Py_None)
        return HOLDS;
    PyObject *tensors = Py_NewRef(self->tensors); /* asking torch runs Python */
    int same = is_static_tensors(tensors) ? static_tensors_hold(tensors) : truth_of(PyObject_CallNoArgs(tensors));
    Py_DECREF(tensors);
    return same < 0 ? gone() : same ? HOLDS : MOVED;
}

static int verdict_of(Guards *self, const Arguments *arguments)
{
    int verdict = verdict_of_state(self, arguments);
    if (verdict == HOLDS)
        verdict = verdict_of_tensors(self);
    return verdict == HOLDS ? verdict_between(self, self->first, self->count, arguments) : verdict;
}

int guards_verdict(PyObject *guards, const uint64_t *addresses, Py_ssize_t count)
{
    Arguments arguments = {addresses, NULL, count};
    return verdict_of((Guards *)guards, &arguments);
}

static PyObject *guards_call(PyObject *self, PyObject *const *args, size_t nargsf, PyObject *names)
{
    if (names != NULL || PyVectorcall_NARGS(nargsf) != 1) {
        PyErr_SetString(PyExc_TypeError, "guards take the tensors of a call, a sequence");
        return NULL;
    }
    PyObject *leaves = PySequence_Fast(args[0], "guards take the tensors of a call, a sequence");
    if (leaves == NULL)
        return NULL;
    Arguments arguments = {NULL, PySequence_Fast_ITEMS(leaves), PySequence_Fast_GET_SIZE(leaves)};
    int verdict = verdict_of((Guards *)self, &arguments);
    Py_DECREF(leaves);
    return verdict < 0 ? NULL : PyLong_FromLong(verdict);
}

static int guards_traverse(PyObject *object, visitproc visit, void *arg)
{
    Guards *self = (Guards *)object;
    for (Py_ssize_t i = 0; i < self->count; i++) {
        Py_VISIT(self->guards[i].holder);
        Py_VISIT(self->guards[i].key);
        Py_VISIT(self->guards[i].expected);
        Py_VISIT(self->guards[i].type);
    }
    Py_VISIT(self->tensors);
    return 0;
}

static int guards_clear(PyObject *object)
{
    Guards *self = (Guards *)object;
    self->first = self->sorted = 0;
    while (self->count) {
        Guard guard = self->guards[--self->count];
        version_done(guard.of_dict); /* before what it is about */
        Py_DECREF(guard.holder);
        Py_DECREF(guard.key);
        Py_DECREF(guard.expected);
        Py_XDECREF(guard.type);
    }
    return 0;
}

static void guards_dealloc(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    guards_clear(self);
    Py_XDECREF(((Guards *)self)->tensors);
    PyMem_Free(((Guards *)self)->guards);
    PyMem_Free(((Guards *)self)->tables);
    PyMem_Free(((Guards *)self)->order);
    Py_TYPE(self)->tp_free(self);
}

/* Which of some names a text is, or -1. */
static int place_among(PyObject *text, const char *const *names)
{
    for (int i = 0; PyUnicode_Check(text) && names[i] != NULL; i++)
        if (PyUnicode_CompareWithASCIIString(text, names[i]) == 0)
            return i;
    return -1;
}

static int are_members(PyObject *holder, PyObject *expected)
{
    if (!is_dict(holder) || !PyTuple_Check(expected) || PyTuple_GET_SIZE(expected) != 2)
        return 0;
    PyObject *absent = PyTuple_GET_ITEM(expected, 0), *pairs = PyTuple_GET_ITEM(expected, 1);
    if (!PyTuple_Check(absent) || !PyTuple_Check(pairs))
        return 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(pairs); i++) {
        PyObject *pair = PyTuple_GET_ITEM(pairs, i);
        if (!PyTuple_Check(pair) || PyTuple_GET_SIZE(pair) != 2)
            return 0;
    }
    return 1;
}

/* A tuple of so many parts, all of which but the first ``odd`` are tuples of one length. */
static int are_columns(PyObject *expected, Py_ssize_t count, Py_ssize_t odd)
{
    if (!PyTuple_Check(expected) || PyTuple_GET_SIZE(expected) != count)
        return 0;
    for (Py_ssize_t i = odd; i < count; i++) {
        PyObject *one = PyTuple_GET_ITEM(expected, i);
        if (!PyTuple_Check(one) || PyTuple_GET_SIZE(one) != PyTuple_GET_SIZE(PyTuple_GET_ITEM(expected, odd)))
            return 0;
    }
    return 1;
}

static int are_all_functions(PyObject *holder, PyObject *expected)
{
    if (!PyTuple_Check(holder) || !PyTuple_Check(expected) ||
        PyTuple_GET_SIZE(expected) != 3 * PyTuple_GET_SIZE(holder))
        return 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(holder); i++)
        if (!PyFunction_Check(PyTuple_GET_ITEM(holder, i)))
            return 0;
    return 1;
}

static int are_all_classes(PyObject *holder)
{
    Py_ssize_t i = 0, count = PyTuple_Check(holder) ? PyTuple_GET_SIZE(holder) : -1;
    while (i < count && PyType_Check(PyTuple_GET_ITEM(holder, i)))
        i++;
    return i == count;
}

static Told told(PyObject *name)
{
    static const char *const names[] = {"__name__", "__qualname__", "__module__", "__doc__"};
    int what = 0;
    while (what < TELLS_NOTHING && !(PyUnicode_Check(name) && PyUnicode_CompareWithASCIIString(name, names[what]) == 0))
        what++;
    return (Told)what;
}

static int are_all_definitions(const Guard *guard)
{
    PyObject *holder = guard->holder;
    if (!PyTuple_Check(holder) || !PyTuple_Check(guard->expected) || told(guard->key) == TELLS_NOTHING ||
        PyTuple_GET_SIZE(guard->expected) != PyTuple_GET_SIZE(holder))
        return 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(holder); i++)
        if (!PyFunction_Check(PyTuple_GET_ITEM(holder, i)) && !PyType_Check(PyTuple_GET_ITEM(holder, i)))
            return 0;
    return 1;
}

/* Of the kinds that are about a whole object. */
static int is_sound_whole(const Guard *guard)
{
    PyObject *holder = guard->holder, *expected = guard->expected;
    if (guard->reach != AT_ITSELF)
        return 0;
    switch (guard->kind) {
    case HAS_NAMES:
        return are_columns(expected, 4, 1) && PyFrozenSet_CheckExact(PyTuple_GET_ITEM(expected, 0)) &&
               (PyDict_Check(holder) || PyType_Check(holder) || PyWeakref_Check(holder));
    case IS_TABLE:
        return are_columns(expected, 3, 0) && PyDict_Check(holder);
    case IS_SEQUENCE:
        return are_columns(expected, 2, 0) && PyType_Check(guard->key) && ((PyTypeObject *)guard->key)->tp_iter != NULL &&
               PyObject_TypeCheck(holder, (PyTypeObject *)guard->key);
    case ARE_FUNCTIONS:
        return are_all_functions(holder, expected);
    case HAVE_BASES:
        return are_all_classes(holder) && PyTuple_Check(expected) &&
               PyTuple_GET_SIZE(holder) == PyTuple_GET_SIZE(expected);
    case ARE_TOLD:
        return are_all_definitions(guard);
    default:
        return PyTuple_Check(holder) && are_columns(expected, 2, 0) &&
               PyTuple_GET_SIZE(holder) == PyTuple_GET_SIZE(PyTuple_GET_ITEM(expected, 0));
    }
}

/* The guard's parts fit together: what comes later does not have to ask. */
static int is_sound(const Guard *guard)
{
    PyObject *expected = guard->expected;
    int is_pair = PyTuple_Check(expected) && PyTuple_GET_SIZE(expected) == 2;
    int has_object = guard->reach <= AT_CALL || guard->reach >= AT_SLOT;
    if ((guard->reach == AT_CELL && !PyCell_Check(guard->holder)) ||
        (guard->reach == AT_SLOT && Py_TYPE(guard->key)->tp_descr_get == NULL) ||
        (guard->reach == AT_CONTEXT && !PyContextVar_CheckExact(guard->holder)))
        return 0;
    switch (guard->kind) {
    case IS_VALUE: /* of a root: what a weak reference or a method leads to, which only goes with the reference */
        return has_object || guard->reach == AT_ITSELF;
    case IS_PRESENT:
        return has_object;
    case IS_OBJECT:
        return has_object && PyTuple_Check(expected) && PyTuple_GET_SIZE(expected) == 3 &&
               (PyTuple_GET_ITEM(expected, 0) == Py_None || PyWeakref_Check(PyTuple_GET_ITEM(expected, 0))) &&
               PyType_Check(PyTuple_GET_ITEM(expected, 1));
    case IS_ABSENT:
        return guard->reach == AT_ITEM && PyDict_Check(guard->holder);
    case HAS_LENGTH:
        return guard->reach == AT_ITSELF && PyLong_Check(expected);
    case ARE_EMPTY:
        return guard->reach == AT_ITSELF && PyTuple_Check(guard->holder);
    case HAS_MEMBERS:
        return guard->reach == AT_ITSELF && are_members(guard->holder, expected);
    case HAS_ADDRESS:
        return guard->reach == AT_ARGUMENT && PyLong_Check(guard->key) && PyLong_Check(expected);
    case HAS_NAMES:
    case IS_TABLE:
    case IS_SEQUENCE:
    case ARE_FUNCTIONS:
    case HAVE_BASES:
    case ARE_OF_CLASSES:
    case ARE_TOLD:
        return is_sound_whole(guard);
    default:
        return guard->reach == AT_ARGUMENT && PyLong_Check(guard->key) && is_pair &&
               PyLong_Check(PyTuple_GET_ITEM(expected, 0)) && PyBytes_Check(PyTuple_GET_ITEM(expected, 1));
    }
}

/* Numbers and types that are expected: 0, -1. */
static int take_expected(Guard *guard)
{
    PyObject *expected = guard->expected;
    guard->version = guard->number = 0;
    guard->needs = -1;
    guard->of_dict = NULL;
    guard->type = NULL;
    if (!is_sound(guard)) {
        PyErr_SetString(PyExc_ValueError, "no such guard");
        return -1;
    }
    if (guard->kind == HAS_LENGTH || guard->kind == HAS_ADDRESS)
        guard->number = PyLong_AsUnsignedLongLong(expected);
    else if (guard->kind == IS_APART)
        guard->number = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(expected, 0));
    else if (guard->kind == ARE_TOLD)
        guard->number = told(guard->key);
    else if (guard->reach == AT_ITEM && is_dict(guard->holder))
        guard->number = (uint64_t)PyObject_Hash(guard->key);
    if (guard->number == (uint64_t)-1 && PyErr_Occurred())
        return -1;
    if (guard->kind == IS_OBJECT) {
        PyObject *needs = PyTuple_GET_ITEM(expected, 2);
        guard->type = PyTuple_GET_ITEM(expected, 1);
        guard->needs = needs == Py_None ? -1 : needs == Py_True;
    }
    guard->of_dict = versioned(guard);
    return 0;
}

/* A guard of a record, with references of its own: 0, -1. */
static int take_record(PyObject *record, Guard *guard)
{
    static const char *const reaches[] = {"item", "attribute", "closure", "weak", "call", "root", "argument",
                                          "slot", "context", NULL};
    static const char *const tables[] = {"parameter", "buffer", "module", "global", NULL}; /* items, too */
    static const char *const kinds[] = {"value", "object", "present", "absent", "length", "members", "empty",
                                        "address", "apart", "names", "table", "sequence", "functions", "bases",
                                        "classes", "definitions", NULL};
    PyObject *source = is_of(record, slots.Guard.type) ? SLOT(record, Guard, source) : NULL;
    if (source == NULL || !is_of(source, slots.Source.type))
        return -1;
    PyObject *reach = SLOT(source, Source, kind), *kind = SLOT(record, Guard, kind);
    PyObject *verdict = SLOT(record, Guard, verdict);
    guard->holder = SLOT(source, Source, holder);
    guard->key = SLOT(source, Source, name);
    guard->expected = SLOT(record, Guard, expected);
    if (!reach || !kind || !verdict || !guard->holder || !guard->key || !guard->expected)
        return -1;
    int at = place_among(reach, reaches), is = place_among(kind, kinds), number = (int)PyLong_AsLong(verdict);
    at = at < 0 && place_among(reach, tables) >= 0 ? AT_ITEM : at;
    if (PyErr_Occurred())
        return -1;
    if (at < 0 || is < 0 || number <= HOLDS || number > OVERLAPS) {
        PyErr_SetString(PyExc_ValueError, "no such guard");
        return -1;
    }
    guard->reach = at;
    guard->kind = is;
    guard->verdict = number;
    if (take_expected(guard) < 0)
        return -1;
    Py_INCREF(guard->holder);
    Py_INCREF(guard->key);
    Py_INCREF(guard->expected);
    Py_XINCREF(guard->type);
    return 0;
}

/* Adds the guards of some records, which there is room for: 0, -1. */
static int take_records(Guards *self, PyObject *records)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(records); i++) {
        Guard *guard = &self->guards[self->count];
        if (take_record(PyTuple_GET_ITEM(records, i), guard) < 0)
            return -1;
        self->count++;
        if (guard->kind != IS_APART)
            self->first = self->count;
    }
    return 0;
}

/* ``tensors`` is a StaticTensors, a function or None: 1, or 0 with an exception set. */
static int are_tensors(PyObject *tensors)
{
    if (tensors != NULL && (tensors == Py_None || PyCallable_Check(tensors)))
        return 1;
    PyErr_SetString(PyExc_TypeError, "what tells of tensors is a function, or None");
    return 0;
}

/* A Guards object with room for so many guards, and none in it; NULL with an exception set. */
static Guards *made(Py_ssize_t room, PyObject *tensors)
{
    if (!are_tensors(tensors))
        return NULL;
    Guards *self = (Guards *)GuardsType.tp_alloc(&GuardsType, 0);
    if (self == NULL)
        return NULL;
    self->vectorcall = guards_call;
    self->tensors = Py_NewRef(tensors);
    self->guards = PyMem_New(Guard, room + 1);
    if (self->guards == NULL) {
        Py_DECREF(self);
        PyErr_NoMemory();
        return NULL;
    }
    return self;
}

static PyObject *guards_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"guards", "tensors", NULL};
    PyObject *records, *tensors = Py_None;
    (void)type;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!|O", names, &PyTuple_Type, &records, &tensors))
        return NULL;
    Guards *self = made(PyTuple_GET_SIZE(records), tensors);
    if (self != NULL && take_records(self, records) < 0)
        Py_CLEAR(self);
    return (PyObject *)self;
}

static PyObject *guards_beside(PyObject *object, PyObject *args)
{
    Guards *self = (Guards *)object;
    PyObject *records, *tensors;
    if (!PyArg_ParseTuple(args, "O!O", &PyTuple_Type, &records, &tensors))
        return NULL;
    Guards *other = made(self->first + PyTuple_GET_SIZE(records), tensors);
    for (Py_ssize_t i = 0; other != NULL && i < self->first; i++) {
        Guard *guard = &other->guards[other->count++];
        *guard = self->guards[i];
        guard->of_dict = versioned(guard);
        Py_INCREF(guard->holder);
        Py_INCREF(guard->key);
        Py_INCREF(guard->expected);
        Py_XINCREF(guard->type);
        other->first = other->count;
    }
    if (other != NULL && take_records(other, records) < 0)
        Py_CLEAR(other);
    return (PyObject *)other;
}

static PyObject *guards_expect(PyObject *object, PyObject *args)
{
    Guards *self = (Guards *)object;
    Py_ssize_t at;
    PyObject *expected;
    if (!PyArg_ParseTuple(args, "nO", &at, &expected))
        return NULL;
    if (at < 0 || at >= self->count) {
        PyErr_SetString(PyExc_IndexError, "there is no such guard");
        return NULL;
    }
    Guard was = self->guards[at], now = was;
    now.expected = expected;
    if (take_expected(&now) < 0)
        return NULL;
    Py_INCREF(now.expected);
    Py_XINCREF(now.type);
    self->guards[at] = now;
    self->sorted = 0;
    Py_DECREF(was.expected);
    Py_XDECREF(was.type);
    version_done(was.of_dict);
    Py_RETURN_NONE;
}

static PyObject *guards_get_tensors(PyObject *self, void *Py_UNUSED(ignored))
{
    return Py_NewRef(((Guards *)self)->tensors);
}

static int guards_set_tensors(PyObject *self, PyObject *tensors, void *Py_UNUSED(ignored))
{
    if (!are_tensors(tensors))
        return -1;
    Py_SETREF(((Guards *)self)->tensors, Py_NewRef(tensors));
    return 0;
}

static PyMethodDef methods[] = {
    {"expect", guards_expect, METH_VARARGS, "From now on the guard at this place expects something else."},
    {"beside", guards_beside, METH_VARARGS, "The same guards, with other records in place of those about free memory."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef attributes[] = {
    {"tensors", guards_get_tensors, guards_set_tensors, "Tensors that have to be as they were; or None.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyTypeObject GuardsType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "capture.native._native.Guards",
    .tp_doc = "Gives the verdict of guards, for a call on these tensors.",
    .tp_basicsize = sizeof(Guards),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(Guards, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_methods = methods,
    .tp_getset = attributes,
    .tp_new = guards_new,
    .tp_dealloc = guards_dealloc,
    .tp_traverse = guards_traverse,
    .tp_clear = guards_clear,
};

static PyObject *referent(PyObject *module, PyObject *reference)
{
    (void)module;
    if (PyWeakref_Check(reference))
        return Py_NewRef((PyObject *)referent_of(reference));
    PyErr_SetString(PyExc_TypeError, "this is no weak reference");
    return NULL;
}

/* The dict that an object keeps its attributes in, whatever its class has by the name ``__dict__``. */
static PyObject *own_dict(PyObject *module, PyObject *object)
{
    (void)module;
    PyObject *own = NULL;
    if (Py_TYPE(object)->tp_dictoffset != 0 && !PyType_Check(object) && (own = PyObject_GenericGetDict(object, NULL)) == NULL)
        PyErr_Clear();
    return own == NULL ? Py_NewRef(Py_None) : own;
}

static PyMethodDef functions[] = {
    {"own_dict", own_dict, METH_O, "The dict that an object keeps its attributes in, or None. No code of its class runs."},
    {"referent", referent, METH_O, "What a weak reference or a weak proxy refers to, or None."},
    {NULL, NULL, 0, NULL},
};

int add_guards(PyObject *module)
{
    s_dict = PyUnicode_InternFromString("__dict__");
    s_requires_grad = PyUnicode_InternFromString("requires_grad");
    if (s_dict == NULL || s_requires_grad == NULL || PyType_Ready(&GuardsType) < 0)
        return -1;
    if (PyModule_AddFunctions(module, functions) < 0)
        return -1;
    PyObject *collections = PyImport_ImportModule("collections");
    deque_type = collections == NULL ? NULL : (PyTypeObject *)PyObject_GetAttrString(collections, "deque");
    Py_XDECREF(collections);
    if (deque_type == NULL)
        return -1;
    stand_ins = PyDict_New(); /* for as long as the process lives */
    if (stand_ins == NULL || PyModule_AddObjectRef(module, "stand_ins", stand_ins) < 0)
        return -1;
    return PyModule_AddObjectRef(module, "Guards", (PyObject *)&GuardsType);
}
