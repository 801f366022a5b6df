/* A call with a clean-up that runs whatever ends it. A signal handler may raise between any two steps of Python, also in a
   ``finally`` and at the begin of a ``with``: only C can be sure that the clean-up runs. */
#include "native.h"

#define TRIES 64

PyObject *taken_error(void)
{
#if PY_VERSION_HEX >= 0x030C0000
    return PyErr_GetRaisedException();
#else
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    if (traceback != NULL)
        PyException_SetTraceback(value, traceback);
    Py_XDECREF(type);
    Py_XDECREF(traceback);
    return value;
#endif
}

void raise_again(PyObject *error)
{
    PyObject *traceback = PyException_GetTraceback(error);
    PyErr_Restore(Py_NewRef(Py_TYPE(error)), Py_NewRef(error), traceback);
}

static _Thread_local Commit *in_progress; /* the innermost one of this thread */

void commit_begin(Commit *commit)
{
    *commit = (Commit){.around = in_progress};
    in_progress = commit;
}

int commit_puts_off(Commit *commit)
{
    if (++commit->tries >= TRIES || (commit->errors == NULL && (commit->errors = PyList_New(0)) == NULL))
        return 0;
    PyObject *error = taken_error();
    if (PyList_Append(commit->errors, error) < 0)
        PyErr_Clear();
    Py_DECREF(error);
    return 1;
}

int commit_ran(Commit *commit, int ended)
{
    commit->ran |= ended;
    return ended || (commit->ran && commit_puts_off(commit));
}

void commit_end(Commit *commit)
{
    in_progress = commit->around;
}

int commit_handed_up(const Commit *commit)
{
    Commit *around = commit->around;
    if (around == NULL)
        return commit_told(commit, Py_None);
    around->ran |= commit->ran;
    if (commit->errors == NULL)
        return 0;
    if (around->errors == NULL)
        around->errors = Py_NewRef(commit->errors);
    else if (PyList_SetSlice(around->errors, PY_SSIZE_T_MAX, PY_SSIZE_T_MAX, commit->errors) < 0)
        return -1;
    return 0;
}

int commit_told(const Commit *commit, PyObject *tell)
{
    if (commit->errors == NULL || PyList_GET_SIZE(commit->errors) == 0)
        return 0;
    if (tell == Py_None) {
        raise_again(PyList_GET_ITEM(commit->errors, 0));
        return -1;
    }
    PyObject *done = PyObject_CallOneArg(tell, commit->errors);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* ``finish(ended)`` is called until it ends well, also where ``run`` raised. A part of another commit leaves what was
   put off to that one, whatever ends it: the error of ``run`` may be dealt with, and an interrupt has to come out. */
static PyObject *committed(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    if (count < 3 || count > 4 || !PyTuple_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "a function, its arguments, what comes after, and who is told");
        return NULL;
    }
    Commit commit;
    commit_begin(&commit);
    PyObject *made = PyObject_Call(args[0], args[1], NULL), *failed = NULL, *result = NULL;
    int ended = commit_ran(&commit, made != NULL);
    Py_XDECREF(made);
    if (!ended)
        failed = taken_error();
    do
        result = PyObject_CallOneArg(args[2], ended ? Py_True : Py_False);
    while (result == NULL && commit_puts_off(&commit));
    commit_end(&commit);
    if (failed != NULL) {
        PyErr_Clear();
        Py_CLEAR(result);
        if ((count == 4 ? commit_told(&commit, args[3]) : commit.around ? commit_handed_up(&commit) : 0) == 0)
            raise_again(failed);
        Py_DECREF(failed);
    } else if (result != NULL && (count == 3 ? commit_handed_up(&commit) : commit_told(&commit, args[3])) < 0)
        Py_CLEAR(result);
    Py_XDECREF(commit.errors);
    return result;
}

/* ``holder.name`` is ``value`` while ``function`` runs, whatever ends it. */
static PyObject *within(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    if (count < 5 || !PyTuple_Check(args[4])) {
        PyErr_SetString(PyExc_TypeError, "an object, a name, a value, a function and its arguments");
        return NULL;
    }
    PyObject *before = PyObject_GetAttr(args[0], args[1]), *result = NULL;
    if (before != NULL && PyObject_SetAttr(args[0], args[1], args[2]) == 0) {
        result = PyObject_Call(args[3], args[4], count > 5 && args[5] != Py_None ? args[5] : NULL);
        PyObject *error = result == NULL ? taken_error() : NULL;
        if (PyObject_SetAttr(args[0], args[1], before) < 0)
            Py_CLEAR(result);
        else if (error != NULL)
            raise_again(error);
        Py_XDECREF(error);
    }
    Py_XDECREF(before);
    return result;
}

/* ``mend(errors)`` is called until it ends well: with what ended the call, and what ended ``mend`` since. It gives the
   result in a tuple, or the error to be raised, or None for the first. */
static PyObject *guarded(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    if (count != 3 || !PyTuple_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "a function, its arguments and what puts things right");
        return NULL;
    }
    PyObject *result = PyObject_Call(args[0], args[1], NULL);
    if (result != NULL)
        return result;
    PyObject *error = taken_error(), *errors = PyList_New(1), *verdict = NULL;
    if (errors == NULL) {
        PyErr_Clear();
        raise_again(error);
        Py_DECREF(error);
        return NULL;
    }
    PyList_SET_ITEM(errors, 0, Py_NewRef(error));
    for (int i = 0; i < TRIES && verdict == NULL; i++) {
        verdict = PyObject_CallOneArg(args[2], errors);
        if (verdict == NULL) {
            PyObject *other = taken_error();
            if (PyList_Append(errors, other) < 0)
                PyErr_Clear();
            Py_DECREF(other);
        }
    }
    Py_DECREF(errors);
    if (verdict != NULL && PyTuple_Check(verdict) && PyTuple_GET_SIZE(verdict) == 1)
        result = Py_NewRef(PyTuple_GET_ITEM(verdict, 0));
    else
        raise_again(verdict != NULL && PyExceptionInstance_Check(verdict) ? verdict : error);
    Py_XDECREF(verdict);
    Py_DECREF(error);
    return result;
}

#define SLICE 0.1 /* seconds */

/* Whether the lock is taken, or -1. While others have it, ``patience()`` is called from time to time, which may raise;
   None waits for nobody. */
static int take(PyObject *lock, PyObject *patience)
{
    for (;;) {
        PyObject *held = patience == Py_None ? PyObject_CallMethod(lock, "acquire", "O", Py_False)
                                             : PyObject_CallMethod(lock, "acquire", "Od", Py_True, SLICE);
        int taken = held == NULL ? -1 : PyObject_IsTrue(held);
        Py_XDECREF(held);
        if (taken != 0 || patience == Py_None)
            return taken;
        PyObject *asked = PyObject_CallNoArgs(patience);
        if (asked == NULL)
            return -1;
        Py_DECREF(asked);
    }
}

/* The function's result, under a lock, which is given back whatever ends the function. NotImplemented where there was
   no waiting for it. */
static PyObject *locked(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    if (count != 4 || !PyTuple_Check(args[2])) {
        PyErr_SetString(PyExc_TypeError, "a lock, a function, its arguments, and what is asked while others have the lock");
        return NULL;
    }
    int taken = take(args[0], args[3]);
    if (taken <= 0)
        return taken < 0 ? NULL : Py_NewRef(Py_NotImplemented);
    PyObject *result = PyObject_Call(args[1], args[2], NULL);
    PyObject *error = result == NULL ? taken_error() : NULL;
    PyObject *done = PyObject_CallMethod(args[0], "release", NULL);
    if (done == NULL)
        Py_CLEAR(result);
    else if (error != NULL)
        raise_again(error);
    Py_XDECREF(done);
    Py_XDECREF(error);
    return result;
}

static PyMethodDef functions[] = {
    {"guarded", (PyCFunction)(void (*)(void))guarded, METH_FASTCALL,
     "guarded(run, arguments, mend): the call's result; whatever ends it, mend(errors) is called until it ends well."},
    {"committed", (PyCFunction)(void (*)(void))committed, METH_FASTCALL,
     "committed(run, arguments, finish, tell): finish(ended) is called until it ends well; what came in between is told."},
    {"within", (PyCFunction)(void (*)(void))within, METH_FASTCALL,
     "within(holder, name, value, function, arguments, keywords): the attribute is the value while the function runs."},
    {"locked", (PyCFunction)(void (*)(void))locked, METH_FASTCALL,
     "locked(lock, function, arguments, patience): the function's result; whatever ends it, the lock is given back. "
     "patience: called while others have it, and may raise; None: NotImplemented then."},
    {NULL, NULL, 0, NULL},
};

int add_guarded(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
