/* Held: whether anybody uses the memory of an output; and outputs that are another alias of a tensor made once. */
#include "native.h"

#include <string.h>

#define NAMES(X) X(data) X(build_left) X(__dict__)
NAMES(DECLARE)
static PyObject *s_clone;

typedef struct {
    PyObject_HEAD
    PyObject *count;   /* a function: strong holders of the storage at an address */
    PyObject *storage; /* the storage's object */
    PyObject *address;
    const char *place;  /* that address, where the count is read there; or NULL */
    const char *data;   /* the memory, as it was then */
    long long alone;    /* holders while nobody uses it */
    Py_ssize_t objects; /* references to the object then */
    PyObject *first;    /* a tensor, where its alias may be handed out again and again; or NULL */
    PyObject *again;    /* that alias */
    Layout layout;
    int shown;   /* users get it, and may hang something on it */
    Seen seen;   /* the alias while nobody uses it */
    char *bytes; /* its metadata */
    vectorcallfunc vectorcall;
} Held;

static PyTypeObject HeldType;

static long long holders(Held *self)
{
    if (self->place != NULL)
        return (uint32_t)count_at(self->place);
    return number_of(PyObject_CallOneArg(self->count, self->address));
}

/* 1, 0, or -1 with an exception set. */
static int is_held(Held *self)
{
    if (self->again != NULL) {
        const Layout *layout = &self->layout;
        const char *impl = pointer_at((const char *)self->again, layout->impl_in_object);
        return impl != self->seen.impl || pointer_at(impl, layout->storage_in_impl) != self->seen.storage ||
               (uint32_t)count_at(impl) != (uint32_t)self->seen.holders || /* whoever has it weakly does not use it */
               (uint32_t)count_at(self->seen.storage) != (uint32_t)self->seen.users ||
               Py_REFCNT(self->again) != self->seen.references || Py_REFCNT(self->storage) > self->objects;
    }
    long long number = holders(self);
    return number < 0 ? -1 : number > self->alone || Py_REFCNT(self->storage) > self->objects;
}

int is_used(PyObject *watch)
{
    if (watch == Py_None)
        return 0;
    if (Py_TYPE(watch) == &HeldType)
        return is_held((Held *)watch);
    PyObject *storage = PyObject_CallNoArgs(watch);
    int used = storage == NULL ? -1 : storage != Py_None;
    Py_XDECREF(storage);
    return used;
}

static PyObject *held_call(PyObject *object, PyObject *const *args, size_t nargsf, PyObject *names)
{
    (void)args;
    Held *self = (Held *)object;
    if (PyVectorcall_NARGS(nargsf) || names != NULL) {
        PyErr_SetString(PyExc_TypeError, "this takes no arguments");
        return NULL;
    }
    int used = is_held(self);
    return used < 0 ? NULL : Py_NewRef(used ? self->storage : Py_None);
}

/* The alias as nobody has it, seen once. */
static int make_again(Held *self)
{
    Py_CLEAR(self->again);
    PyObject *again = PyObject_GetAttr(self->first, s_data);
    if (again == NULL || !see(&self->layout, again, &self->seen)) {
        Py_XDECREF(again);
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "a tensor without memory");
        return -1;
    }
    memcpy(self->bytes, self->seen.impl + self->layout.begin, width_of(&self->layout));
    self->again = again;
    return 0;
}

static PyObject *held_settle(PyObject *object, PyObject *Py_UNUSED(ignored))
{
    Held *self = (Held *)object;
    if (self->first != NULL && make_again(self) < 0)
        return NULL;
    if (self->place != NULL)
        self->data = pointer_at(self->place, self->layout.data_in_storage);
    self->alone = holders(self);
    self->objects = Py_REFCNT(self->storage);
    return self->alone < 0 ? NULL : PyLong_FromLongLong(self->alone - (self->again != NULL));
}

/* Nobody waits for the end of a tensor, or finds something by it: there are no weak references but ``ours``. */
static int is_unwatched(PyObject *tensor, PyObject *ours)
{
    if (!PyType_SUPPORTS_WEAKREFS(Py_TYPE(tensor)))
        return 1;
    PyWeakReference *first = *(PyWeakReference **)PyObject_GET_WEAKREFS_LISTPTR(tensor);
    return first == NULL || ((PyObject *)first == ours && first->wr_next == NULL && Py_REFCNT(ours) == 1);
}

/* Users left nothing on a tensor that they had: no gradient or hook, no attribute, no weak reference. */
static int is_bare(Held *self, PyObject *ours)
{
    if (pointer_at(self->seen.impl, self->layout.meta_in_impl) != NULL || !is_unwatched(self->again, ours))
        return 0;
    PyObject *own = PyObject_GetAttr(self->again, s___dict__);
    int bare = own != NULL && PyDict_Check(own) && PyDict_GET_SIZE(own) == 0;
    Py_XDECREF(own);
    PyErr_Clear();
    return bare;
}

static PyObject *held_part(PyObject *object, PyObject *Py_UNUSED(ignored))
{
    Held *self = (Held *)object;
    if (self->again != NULL) {
        self->alone -= 1;
        Py_CLEAR(self->again);
    }
    Py_RETURN_NONE;
}

/* The alias if nobody has it and it is as it was made: a new reference; NULL without an exception. ``ours``: the weak
   reference to it that is known, or NULL. */
static PyObject *taken_again(PyObject *watch, PyObject *ours)
{
    Held *self = (Held *)watch;
    if (Py_TYPE(watch) != &HeldType || self->again == NULL || Py_REFCNT(self->storage) > self->objects ||
        !is_as_seen(&self->layout, self->again, &self->seen, self->bytes))
        return NULL;
    if (self->shown && !is_bare(self, ours)) {
        Py_DECREF(held_part(watch, NULL)); /* weak references end */
        return NULL;
    }
    return Py_NewRef(self->again);
}

static PyObject *held_again(PyObject *object, PyObject *Py_UNUSED(ignored))
{
    PyObject *again = taken_again(object, NULL);
    return again == NULL ? Py_NewRef(Py_None) : again;
}

static PyObject *held_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"count", "storage", "address", "first", "layout", "shown", NULL};
    PyObject *count, *storage, *address, *first = Py_None, *where = Py_None;
    Layout layout = {0};
    int shown = 0;
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "OOO!|OOp", names, &count, &storage, &PyLong_Type, &address, &first, &where, &shown))
        return NULL;
    if (where == Py_None ? first != Py_None : !PyTuple_Check(where)) {
        PyErr_SetString(PyExc_TypeError, "where torch keeps what it knows has to be told");
        return NULL;
    }
    if (where != Py_None && layout_from(where, &layout) < 0)
        return NULL;
    Held *self = (Held *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->count = Py_NewRef(count);
    self->storage = Py_NewRef(storage);
    self->address = Py_NewRef(address);
    self->vectorcall = held_call;
    self->layout = layout;
    self->shown = shown;
    self->place = where == Py_None ? NULL : PyLong_AsVoidPtr(address);
    self->bytes = first == Py_None ? NULL : PyMem_New(char, width_of(&layout) + 1);
    if (first != Py_None && self->bytes == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    self->first = first == Py_None ? NULL : Py_NewRef(first);
    return (PyObject *)self;
}

static int held_traverse(PyObject *object, visitproc visit, void *arg)
{
    Held *self = (Held *)object;
    Py_VISIT(self->count);
    Py_VISIT(self->storage);
    Py_VISIT(self->first);
    Py_VISIT(self->again);
    return 0;
}

/* Nothing is cleared to break a cycle: a storage's object and the tensors lead nowhere. */
static void held_dealloc(PyObject *object)
{
    Held *self = (Held *)object;
    PyObject_GC_UnTrack(object);
    Py_XDECREF(self->count);
    Py_XDECREF(self->storage);
    Py_XDECREF(self->address);
    Py_XDECREF(self->first);
    Py_XDECREF(self->again);
    PyMem_Free(self->bytes);
    Py_TYPE(object)->tp_free(object);
}

/* The first tensor lies where it was made: 1, 0, -1. */
static int is_in_place(PyObject *watch, PyObject *first, PyObject *source)
{
    Held *held = (Held *)watch;
    if (Py_TYPE(watch) == &HeldType && held->place != NULL) {
        const char *impl = pointer_at((const char *)first, held->layout.impl_in_object);
        return impl != NULL && pointer_at(impl, held->layout.storage_in_impl) == held->place &&
               pointer_at(held->place, held->layout.data_in_storage) == held->data;
    }
    PyObject *known = SLOT(source, Source, address);
    uint64_t address = 0, expected = known == NULL ? 0 : PyLong_AsUnsignedLongLong(known);
    return PyErr_Occurred() || address_of(first, &address) < 0 ? -1 : address == expected;
}

/* ``Source.tensor`` where the first tensor is still what it was, else NULL without an exception. */
static PyObject *alias_of(PyObject *source, PyObject *watch, PyObject *ours)
{
    if (!is_of(source, slots.Source.type))
        return NULL;
    PyObject *held = SLOT(source, Source, held), *first, *result;
    if (held == NULL || watch != held)
        return NULL;
    Py_INCREF(held); /* the end of an alias may run Python */
    result = taken_again(held, ours);
    Py_DECREF(held);
    if (result != NULL || (first = SLOT(source, Source, first)) == NULL || first == Py_None)
        return result;
    watch = SLOT(source, Source, held);
    if (watch == NULL)
        return NULL;
    Py_INCREF(watch);
    Py_INCREF(first);
    if (is_in_place(watch, first, source) > 0)
        result = PyObject_GetAttr(first, s_data);
    Py_DECREF(first);
    Py_DECREF(watch);
    return result;
}

/* The one weak reference to what was handed out last of a group of one tensor, or NULL: borrowed. */
static PyObject *known_reference(PyObject *tensors, Py_ssize_t number)
{
    PyObject *known = tensors == NULL || number >= PyList_GET_SIZE(tensors) ? NULL : PyList_GET_ITEM(tensors, number);
    return known != NULL && PyList_CheckExact(known) && PyList_GET_SIZE(known) == 1 ? PyList_GET_ITEM(known, 0) : NULL;
}

/* ``OutputPlan._hand_out``: the tensor is known by a weak reference. */
static int note_tensor(PyObject *tensors, Py_ssize_t number, PyObject *tensor)
{
    PyObject *reference = PyWeakref_NewRef(tensor, NULL);
    if (reference != NULL && known_reference(tensors, number) == reference) { /* handed out again */
        Py_DECREF(reference);
        return 0;
    }
    PyObject *known = reference == NULL ? NULL : PyList_New(1);
    if (known == NULL) {
        Py_XDECREF(reference);
        return -1;
    }
    PyList_SET_ITEM(known, 0, reference);
    return PyList_SetItem(tensors, number, known);
}

/* The next tensor of a source, which may be asked for as it stands; NULL without an exception: Python has to. */
static PyObject *handed_out(PyObject *source, PyObject *live, Py_ssize_t number, PyObject *tensors)
{
    if (source == Py_None || number >= PyList_GET_SIZE(live))
        return NULL;
    PyObject *result = alias_of(source, PyList_GET_ITEM(live, number), known_reference(tensors, number));
    if (result != NULL && tensors != NULL && note_tensor(tensors, number, result) < 0)
        Py_CLEAR(result);
    return result;
}

int copies_outputs(NodeView *view)
{
    if (view->preserving)
        return 0;
    PyObject *policy = is_of(view->outputs, slots.OutputPlan.type) ? SLOT(view->outputs, OutputPlan, policy) : NULL;
    return policy == NULL ? -1 : policy == s_clone ? 1 : PyObject_RichCompareBool(policy, s_clone, Py_EQ);
}

PyObject *single_output(NodeView *view)
{
    if (copies_outputs(view))
        return NULL;
    return handed_out(view->source, view->live, 0, view->preserving ? NULL : view->tensors);
}

/* Puts the next tensors of these groups into values; gives the groups that are left to Python. */
static PyObject *put_tensors(
    PyObject *sources, PyObject *live, PyObject *positions, PyObject *values, PyObject *numbers, PyObject *tensors)
{
    PyObject *left = PyList_New(0);
    for (Py_ssize_t i = 0; left != NULL && i < PyTuple_GET_SIZE(numbers); i++) {
        PyObject *name = PyTuple_GET_ITEM(numbers, i);
        Py_ssize_t number = PyLong_AsSsize_t(name);
        Py_ssize_t position = number < 0 || number >= PyTuple_GET_SIZE(positions)
                                  ? -1
                                  : PyLong_AsSsize_t(PyTuple_GET_ITEM(positions, number));
        if (position < 0 || number >= PyTuple_GET_SIZE(sources)) {
            if (!PyErr_Occurred())
                PyErr_SetString(PyExc_IndexError, "no such group");
            Py_CLEAR(left);
            break;
        }
        PyObject *made = handed_out(PyTuple_GET_ITEM(sources, number), live, number, tensors);
        int failed = made == NULL ? PyErr_Occurred() || PyList_Append(left, name) < 0
                                  : PyList_SetItem(values, position, made) < 0;
        if (failed)
            Py_CLEAR(left);
    }
    return left;
}

static PyObject *hand_out(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *sources, *live, *positions, *values, *numbers, *tensors;
    if (!PyArg_ParseTuple(
            args, "O!O!O!O!O!O", &PyTuple_Type, &sources, &PyList_Type, &live, &PyTuple_Type, &positions, &PyList_Type,
            &values, &PyTuple_Type, &numbers, &tensors))
        return NULL;
    return put_tensors(sources, live, positions, values, numbers, PyList_Check(tensors) ? tensors : NULL);
}

/* Pairs of a position and a value, or of a position and an earlier one with the value. */
static int put_pairs(PyObject *pairs, PyObject *values, int are_positions)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(pairs); i++) {
        PyObject *pair = PyTuple_GET_ITEM(pairs, i), *value = PyTuple_GET_ITEM(pair, 1);
        Py_ssize_t from = are_positions ? PyLong_AsSsize_t(value) : 0;
        value = are_positions ? PyList_GetItem(values, from) : value;
        if (value == NULL || PyList_SetItem(values, PyLong_AsSsize_t(PyTuple_GET_ITEM(pair, 0)), Py_NewRef(value)) < 0)
            return -1;
    }
    return 0;
}

PyObject *several_outputs(NodeView *view, PyObject *pool)
{
    PyObject *plan = view->several, *result = NULL, *left = NULL, *done = NULL;
    Py_ssize_t count = PyLong_AsSsize_t(PyTuple_GET_ITEM(plan, 6));
    PyObject *values = count < 0 ? NULL : PyList_New(count);
    for (Py_ssize_t i = 0; values != NULL && i < count; i++)
        PyList_SET_ITEM(values, i, Py_NewRef(Py_None));
    if (values != NULL)
        left = put_tensors(
            PyTuple_GET_ITEM(plan, 0), view->live, PyTuple_GET_ITEM(plan, 1), values, PyTuple_GET_ITEM(plan, 2),
            view->preserving ? NULL : view->tensors);
    if (left != NULL && PyList_GET_SIZE(left)) {
        PyObject *args[] = {view->outputs, pool, values, left};
        done = PyObject_VectorcallMethod(s_build_left, args, 4, NULL);
        if (done == NULL)
            Py_CLEAR(left);
    }
    if (left != NULL && put_pairs(PyTuple_GET_ITEM(plan, 3), values, 0) == 0 &&
        put_pairs(PyTuple_GET_ITEM(plan, 4), values, 1) == 0)
        result = PyObject_CallOneArg(PyTuple_GET_ITEM(plan, 5), values);
    Py_XDECREF(done);
    Py_XDECREF(left);
    Py_XDECREF(values);
    return result;
}

static PyMethodDef held_methods[] = {
    {"settle", held_settle, METH_NOARGS, "Nobody uses it now: gives the number of its holders."},
    {"part", held_part, METH_NOARGS, "The alias is handed out no more: who has it has it alone."},
    {"again", held_again, METH_NOARGS, "The alias that is handed out again, if nobody has it, else None."},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject HeldType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "capture._native.Held",
    .tp_doc = "Gives a storage while somebody uses it, else None.",
    .tp_basicsize = sizeof(Held),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(Held, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_methods = held_methods,
    .tp_new = held_new,
    .tp_dealloc = held_dealloc,
    .tp_traverse = held_traverse,
};

static PyMethodDef functions[] = {
    {"hand_out", hand_out, METH_VARARGS, "Put the next tensors of sources into values; gives the groups left over."},
    {NULL, NULL, 0, NULL},
};

int add_held(PyObject *module)
{
    NAMES(INTERN)
    INTERN(clone)
    if (PyType_Ready(&HeldType) < 0 || PyModule_AddObjectRef(module, "Held", (PyObject *)&HeldType) < 0)
        return -1;
    return PyModule_AddFunctions(module, functions);
}
