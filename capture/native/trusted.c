/* Trusted: tensors of a call of which it is known that torch's own comparison of metadata would find them as before.

   That comparison takes 0.2 to 0.5 us a tensor, and a backward pass takes dozens of them, nearly all of which are the
   very objects that it took in the step before. Two kinds need not be compared again:

   - aliases that replays hand to each other and nobody else gets (``held.c``). Nothing is looked at but the pointer, as
     long as no such alias has gone on to others or ended since: ``apart_number`` counts that.
   - tensors of arguments that are declared static. A weak reference tells that it is the same object, and torch's C ABI
     that its memory, sizes, strides, dtype and flags are the same (some 20 ns). What the ABI does not tell, such as being
     an inference tensor, never changes of an object that has the same memory.

   One tensor at least goes through torch's comparison in every call, which compares the thread's dispatch keys, too. That
   comparison takes no tensor twice: of one that is given several times the first is looked at, and the others have to be
   the same object. */
#include "torch_abi.h"

#define MOST_TAKES 16 /* that were of no use */

static void forget_trusted(Trusted *self)
{
    for (Py_ssize_t i = 0; self->known != NULL && i < self->count; i++) { /* it may never have begun */
        forget_tensor(&self->known[i].meta);
        Py_CLEAR(self->known[i].reference);
        self->known[i].kind = UNTRUSTED;
    }
    self->holds = 0;
}

void end_trusted(Trusted *self)
{
    forget_trusted(self);
    PyMem_Free(self->known);
    PyMem_Free(self->is_static);
    PyMem_Free(self->is_repeat);
    self->known = NULL;
    self->is_static = self->is_repeat = NULL;
    self->count = 0;
    Py_CLEAR(self->others.check);
    Py_CLEAR(self->others.arguments);
    Py_CLEAR(self->make);
}

int begin_trusted(Trusted *self, PyObject *make, PyObject *is_static, PyObject *shared)
{
    self->count = PyTuple_GET_SIZE(is_static);
    self->make = Py_NewRef(make);
    self->takes = MOST_TAKES;
    self->known = PyMem_Calloc((size_t)self->count + 1, sizeof(*self->known));
    self->is_static = PyMem_Calloc((size_t)self->count + 1, 1);
    self->is_repeat = PyMem_Calloc((size_t)self->count + 1, 1);
    if (self->known == NULL || self->is_static == NULL || self->is_repeat == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < self->count; i++) {
        self->is_static[i] = (char)(PyTuple_GET_ITEM(is_static, i) == Py_True);
        self->is_repeat[i] = PyTuple_GET_SIZE(shared) && PyLong_AsSsize_t(PyTuple_GET_ITEM(shared, 3 * i + 2)) != i;
    }
    return 0;
}

int trusted_hold(Trusted *self, PyObject *const *tensors, uint64_t *addresses)
{
    if (!self->holds || self->apart != apart_number())
        return 0;
    for (Py_ssize_t i = 0; i < self->count; i++) {
        const Trust *known = &self->known[i];
        if (known->kind == UNTRUSTED)
            continue;
        if (tensors[i] != (known->kind == APART ? known->object : referent_of(known->reference)))
            return 0;
        int same = known->kind == APART ? 1 : is_as_known(tensors[i], &known->meta);
        if (same <= 0)
            return same;
        addresses[i] = known->address;
    }
    self->takes += self->takes < MOST_TAKES;
    return 1;
}

/* Notes one tensor: 1 if it is trusted from now on, 0, -1. */
static int take(Trust *known, PyObject *tensor, int is_static)
{
    int apart = is_kept_apart(tensor);
    if (apart < 0 || (!apart && !is_static))
        return apart;
    if (!apart) {
        if (know_tensor(tensor, &known->meta) < 0 || (known->reference = PyWeakref_NewRef(tensor, NULL)) == NULL)
            return -1;
    }
    known->object = tensor;
    known->kind = apart ? APART : STATIC;
    return 1;
}

/* Makes the comparison of all others: 0, -1. */
static int compare_others(Trusted *self, PyObject *const *tensors)
{
    PyObject *others = PyList_New(0), *positions = PyList_New(0);
    int failed = others == NULL || positions == NULL;
    for (Py_ssize_t i = 0; !failed && i < self->count; i++)
        if (self->known[i].kind == UNTRUSTED && !self->is_repeat[i]) {
            PyObject *position = PyLong_FromSsize_t(i);
            failed = position == NULL || PyList_Append(positions, position) < 0 || PyList_Append(others, tensors[i]) < 0;
            Py_XDECREF(position);
        }
    PyObject *check = failed ? NULL : PyObject_CallFunctionObjArgs(self->make, others, positions, NULL);
    Py_XSETREF(self->others.check, check);
    Py_CLEAR(self->others.arguments); /* of another number, perhaps */
    Py_XDECREF(others);
    Py_XDECREF(positions);
    return check == NULL ? -1 : 0;
}

int take_trusted(Trusted *self, PyObject *const *tensors, const uint64_t *addresses)
{
    if (self->takes == 0 || self->count < 2 || !abi_is_known())
        return 0;
    self->takes--;
    forget_trusted(self);
    self->apart = apart_number(); /* before the first look: what changes meanwhile makes it another one */
    Py_ssize_t trusted = 0, others = 0, last = self->count - 1;
    while (self->is_repeat[last]) /* the first is none */
        last--;
    for (Py_ssize_t i = 0; i <= last; i++) {
        if (self->is_repeat[i])
            continue;
        if (!is_plain_tensor(tensors[i]) || addresses[i] == 0 || (i == last && others == 0)) {
            others++;
            continue;
        }
        int taken = take(&self->known[i], tensors[i], self->is_static[i]);
        if (taken < 0) {
            forget_trusted(self);
            return -1;
        }
        self->known[i].address = addresses[i];
        trusted += taken;
        others += !taken;
    }
    if (trusted == 0)
        return 0;
    if (compare_others(self, tensors) < 0) {
        forget_trusted(self);
        return -1;
    }
    self->holds = 1;
    return 0;
}
