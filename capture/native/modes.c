/* Modes: functions of no interest but for what they give. They hold while every one gives what it gave.

   Some are Python's; the others are torch's own in C++, of no arguments or numbers alone, which take 3 ns where Python's
   take 50 to 400. ``_torch_private_modes`` finds those. */
#include "native.h"

#include <string.h>

typedef struct {
    PyObject *function;  /* or a string: an attribute of the one argument */
    PyObject *arguments; /* a tuple */
    PyObject *expected;
    Py_ssize_t at;       /* where the one argument keeps the attribute, if its class has a slot for it; else -1 */
} Term;

/* What a function of torch's gives is its value; a pointer to that, less the bytes in the third argument; to two
   pointers that differ by it; or it is written to where its first argument points, 20 bytes. Or there is no function, and
   the value lies at the address. */
enum { VALUE, BEHIND, APART, WRITTEN, THERE };
#define MOST_WRITTEN 8 /* words */

typedef struct {
    uint64_t address, kind, first, second, third, mask;
} Reader;

typedef struct {
    PyObject_HEAD
    uint64_t thread; /* no other one ever has the number */
    Py_ssize_t count;
    Term *terms;
    Py_ssize_t reader_count;
    Reader *readers;
    uint64_t *expected; /* of each */
    vectorcallfunc vectorcall;
} Modes;

static PyTypeObject ModesType;

int is_modes(PyObject *one)
{
    return Py_TYPE(one) == &ModesType;
}

typedef uint64_t (*Function)(uint64_t, uint64_t, uint64_t);

static inline uint64_t read_one(const Reader *reader)
{
    if (reader->kind == THERE) {
        uint64_t word;
        memcpy(&word, (const void *)(uintptr_t)reader->address, 8);
        return word & reader->mask;
    }
    Function function = (Function)(uintptr_t)reader->address;
    if (reader->kind == WRITTEN) {
        uint64_t words[MOST_WRITTEN] = {0};
        function((uint64_t)(uintptr_t)words, reader->first, reader->second);
        uint64_t mixed = 0;
        for (int i = 0; i < MOST_WRITTEN; i++)
            mixed = mixed * 1099511628211u + words[i];
        return mixed;
    }
    uint64_t found = function(reader->first, reader->second, reader->third), words[2];
    if (reader->kind == BEHIND) {
        memcpy(words, (const char *)(uintptr_t)found + reader->third, 8);
        found = words[0];
    } else if (reader->kind == APART) {
        memcpy(words, (const void *)(uintptr_t)found, 16);
        found = words[1] - words[0];
    }
    return found & reader->mask;
}

static PyObject *found_of(const Term *term)
{
    if (PyUnicode_CheckExact(term->function)) {
        PyObject *holder = PyTuple_GET_ITEM(term->arguments, 0);
        if (term->at >= 0)
            return Py_XNewRef(slot_at(holder, term->at));
        PyObject *found = PyModule_CheckExact(holder) ? PyDict_GetItemWithError(PyModule_GetDict(holder), term->function) : NULL;
        return found != NULL ? Py_NewRef(found) : PyErr_Occurred() ? NULL : PyObject_GetAttr(holder, term->function);
    }
    return PyObject_Vectorcall(
        term->function, ((PyTupleObject *)term->arguments)->ob_item, PyTuple_GET_SIZE(term->arguments), NULL);
}

int modes_hold(PyObject *object)
{
    Modes *self = (Modes *)object;
    if (self->thread != PyThreadState_GetID(PyThreadState_Get()))
        return 0;
    for (Py_ssize_t i = 0; i < self->reader_count; i++)
        if (read_one(&self->readers[i]) != self->expected[i])
            return 0;
    for (Py_ssize_t i = 0; i < self->count; i++) {
        Term *term = &self->terms[i];
        PyObject *found = found_of(term);
        if (found == NULL)
            return -1;
        int same = same_value(found, term->expected);
        Py_DECREF(found);
        if (same <= 0)
            return same;
    }
    return 1;
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
        Py_VISIT(self->terms[i].function);
        Py_VISIT(self->terms[i].arguments);
        Py_VISIT(self->terms[i].expected);
    }
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
        Py_DECREF(terms[i].function);
        Py_DECREF(terms[i].arguments);
        Py_DECREF(terms[i].expected);
    }
    PyMem_Free(terms);
    return 0;
}

static void modes_dealloc(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    modes_clear(self);
    PyMem_Free(((Modes *)self)->readers);
    PyMem_Free(((Modes *)self)->expected);
    Py_TYPE(self)->tp_free(self);
}

static int reader_from(PyObject *given, Reader *reader)
{
    unsigned long long part[6];
    if (!PyTuple_Check(given)) {
        PyErr_SetString(PyExc_TypeError, "a reader is a tuple");
        return -1;
    }
    if (!PyArg_ParseTuple(given, "KKKKKK", &part[0], &part[1], &part[2], &part[3], &part[4], &part[5]))
        return -1;
    *reader = (Reader){part[0], part[1], part[2], part[3], part[4], part[5]};
    if (reader->address == 0 || reader->kind > THERE) {
        PyErr_SetString(PyExc_ValueError, "no such reader");
        return -1;
    }
    return 0;
}

static PyObject *read_mode(PyObject *module, PyObject *given)
{
    (void)module;
    Reader reader;
    return reader_from(given, &reader) < 0 ? NULL : PyLong_FromUnsignedLongLong(read_one(&reader));
}

/* 0, or -1 with an exception set. */
static int take_readers(Modes *self, PyObject *readers)
{
    Py_ssize_t count = PyTuple_GET_SIZE(readers);
    self->readers = PyMem_New(Reader, count + 1);
    self->expected = PyMem_New(uint64_t, count + 1);
    if (self->readers == NULL || self->expected == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        if (reader_from(PyTuple_GET_ITEM(readers, i), &self->readers[i]) < 0)
            return -1;
        self->expected[i] = read_one(&self->readers[i]);
        self->reader_count = i + 1;
    }
    return 0;
}

static PyObject *modes_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *given, *readers = NULL;
    static char *names[] = {"terms", "readers", NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!|O!", names, &PyTuple_Type, &given, &PyTuple_Type, &readers))
        return NULL;
    Modes *self = (Modes *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->vectorcall = modes_call;
    self->thread = PyThreadState_GetID(PyThreadState_Get());
    self->terms = PyMem_New(Term, PyTuple_GET_SIZE(given) + 1);
    if (self->terms == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(given); i++) {
        PyObject *function, *arguments, *expected;
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(given, i), "OO!O", &function, &PyTuple_Type, &arguments, &expected)) {
            Py_DECREF(self);
            return NULL;
        }
        if (PyUnicode_CheckExact(function) && PyTuple_GET_SIZE(arguments) != 1) {
            PyErr_SetString(PyExc_ValueError, "an attribute of one object");
            Py_DECREF(self);
            return NULL;
        }
        Py_ssize_t at = -1;
        if (PyUnicode_CheckExact(function))
            at = slot_of((PyObject *)Py_TYPE(PyTuple_GET_ITEM(arguments, 0)), function);
        self->terms[i] = (Term){Py_NewRef(function), Py_NewRef(arguments), Py_NewRef(expected), at};
        self->count = i + 1;
    }
    if (readers != NULL && take_readers(self, readers) < 0)
        Py_CLEAR(self);
    return (PyObject *)self;
}

static PyTypeObject ModesType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "capture._native.Modes",
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

static PyMethodDef functions[] = {
    {"read_mode", read_mode, METH_O, "What a reader gives now."},
    {NULL, NULL, 0, NULL},
};

int add_modes(PyObject *module)
{
    if (PyType_Ready(&ModesType) < 0 || PyModule_AddObjectRef(module, "Modes", (PyObject *)&ModesType) < 0)
        return -1;
    return PyModule_AddFunctions(module, functions);
}
