/* Steps: what a call does once its arguments fit, from the tree on: the second half of ``capture/_shortcut.py``. */
#include "native.h"

#define NAMES(X) \
    X(view) X(begin_call) X(current) X(root) X(followers) X(pool) X(find) X(verified) X(state_holds) \
    X(check) X(checker) X(facts) X(see) X(unchecked) X(registered) X(recording) X(replay) X(build_single) X(mark) X(pool_is_at) X(replays)
NAMES(DECLARE)

static int is_true_of(PyObject *holder, PyObject *name)
{
    PyObject *found = PyObject_GetAttr(holder, name);
    if (found == NULL)
        return -1;
    int truth = PyObject_IsTrue(found);
    Py_DECREF(found);
    return truth;
}

long long number_of(PyObject *found)
{
    long long number = found == NULL ? -1 : PyLong_AsLongLong(found);
    Py_XDECREF(found);
    return number;
}

int truth_of(PyObject *result)
{
    if (result == NULL)
        return -1;
    int truth = PyObject_IsTrue(result);
    Py_DECREF(result);
    return truth;
}

/* The view of a tree or a node: a new reference, or NULL with an exception. */
static PyObject *view_of(PyObject *holder, PyTypeObject *type)
{
    PyObject *view = PyObject_GetAttr(holder, s_view);
    if (view != NULL && Py_TYPE(view) != type) {
        PyErr_SetString(PyExc_TypeError, "no view of a tree or a recording");
        Py_CLEAR(view);
    }
    return view;
}

/* Some output of the node is still used. */
static int has_used_outputs(PyObject *node)
{
    NodeView *view = (NodeView *)view_of(node, &NodeViewType);
    if (view == NULL)
        return -1;
    int used = 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(view->live) && !used; i++) {
        PyObject *watch = Py_NewRef(PyList_GET_ITEM(view->live, i));
        used = is_used(watch);
        Py_DECREF(watch);
    }
    Py_DECREF(view);
    return used;
}

/* ``Node.may_run``: all that was dead when it was recorded is dead now. */
static int may_run(NodeView *view)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(view->before); i++) {
        PyObject *pair = PyTuple_GET_ITEM(view->before, i), *live = PyTuple_GET_ITEM(pair, 0);
        Py_ssize_t number = PyLong_AsSsize_t(PyTuple_GET_ITEM(pair, 1));
        if (number < 0 || number >= PyList_GET_SIZE(live))
            return PyErr_Occurred() ? -1 : 0;
        PyObject *watch = Py_NewRef(PyList_GET_ITEM(live, number));
        int used = is_used(watch);
        Py_DECREF(watch);
        if (used)
            return used < 0 ? -1 : 0;
    }
    return 1;
}

/* ``Tree.begin_call`` where the path ends because nothing on it is used any more: 1, else 0 with nothing done. */
static int ends_by_itself(PyObject *tree, TreeView *view)
{
    PyObject *path = view->path;
    if (PyList_GET_SIZE(view->kept))
        return 0;
    for (Py_ssize_t i = PyList_GET_SIZE(path) - 1; i >= 0; i--) {
        if (i >= PyList_GET_SIZE(path)) /* looking at outputs runs Python */
            continue;
        PyObject *node = Py_NewRef(PyList_GET_ITEM(path, i));
        int used = has_used_outputs(node);
        Py_DECREF(node);
        if (used)
            return used < 0 ? -1 : 0;
    }
    PyObject *root = PyObject_GetAttr(tree, s_root);
    int done = root != NULL && PyList_SetSlice(path, 0, PyList_GET_SIZE(path), NULL) == 0 &&
               PyObject_SetAttr(tree, s_current, root) == 0;
    if (done)
        PyDict_Clear(view->times);
    Py_XDECREF(root);
    return done ? 1 : -1;
}

/* Outputs are still used, but the step goes on as it is: it ends by marks alone, and no mark came since. */
static int goes_on(const Steps *self, PyObject *tree, TreeView *view)
{
    PyObject *marks = PyObject_CallNoArgs(self->steps_begun), *mark = NULL;
    int same = marks == NULL ? -1 : PyObject_IsTrue(marks);
    if (same > 0) {
        mark = PyObject_GetAttr(tree, s_mark);
        same = mark == NULL ? -1 : PyObject_RichCompareBool(marks, mark, Py_EQ);
    }
    Py_XDECREF(marks);
    Py_XDECREF(mark);
    if (same <= 0)
        return same;
    PyObject *times = PyDict_GetItemWithError(view->times, self->function);
    return times == NULL ? (PyErr_Occurred() ? -1 : 1) : PyObject_RichCompareBool(times, self->limit, Py_LE);
}

/* End the step if it is over. 1: the way goes on; 0: it does not fit. */
static int begins(const Steps *self, PyObject *tree, TreeView *view)
{
    if (!PyList_GET_SIZE(view->warm) && !PyList_GET_SIZE(view->buried) && !PyList_GET_SIZE(view->lingering)) {
        if (PyList_GET_SIZE(view->path) == 0)
            return 1;
        int ended = ends_by_itself(tree, view);
        ended = ended ? ended : goes_on(self, tree, view);
        if (ended)
            return ended;
    }
    PyObject *args[] = {tree, self->function, self->limit, self->number};
    PyObject *done = PyObject_VectorcallMethod(s_begin_call, args, 4, NULL);
    if (done == NULL)
        return -1;
    Py_DECREF(done);
    return PyList_GET_SIZE(view->warm) == 0;
}

/* The arguments lie where they did on the recorded path: 1, 0, -1. */
static int stands(NodeView *node, PyObject *tree, const uint64_t *addresses, Py_ssize_t count)
{
    PyObject *pool = NULL;
    int result = PyTuple_GET_SIZE(node->pattern) == count;
    for (Py_ssize_t i = 0; result > 0 && i < count; i++) {
        PyObject *recorded = PyTuple_GET_ITEM(node->pattern, i);
        if (recorded != Py_None) {
            uint64_t address = PyLong_AsUnsignedLongLong(recorded);
            result = address == (uint64_t)-1 && PyErr_Occurred() ? -1 : address == addresses[i];
            continue;
        }
        if (pool == NULL)
            pool = PyObject_GetAttr(tree, s_pool);
        PyObject *address = pool == NULL ? NULL : PyLong_FromUnsignedLongLong(addresses[i]);
        int inside = address == NULL ? -1 : truth_of(PyObject_CallMethodOneArg(pool, s_find, address));
        Py_XDECREF(address);
        result = inside < 0 ? -1 : !inside;
    }
    Py_XDECREF(pool);
    return result;
}

/* The node that the current one is to be followed by: a new reference; NULL without an exception if none fits. */
static PyObject *fitting(
    const Steps *self, PyObject *tree, TreeView *at, const uint64_t *addresses, NodeView **view)
{
    PyObject *current = PyObject_GetAttr(tree, s_current);
    PyObject *followers = current == NULL ? NULL : PyObject_GetAttr(current, s_followers);
    Py_XDECREF(current);
    if (followers == NULL)
        return NULL;
    PyObject *node = Py_XNewRef(PyDict_GetItemWithError(followers, self->number));
    Py_DECREF(followers);
    if (node == NULL || (*view = (NodeView *)view_of(node, &NodeViewType)) == NULL) {
        Py_XDECREF(node);
        return NULL;
    }
    int fits = PyList_GET_SIZE(at->path) ? stands(*view, tree, addresses, self->tensors) : 1;
    if (fits > 0)
        fits = may_run(*view);
    if (fits > 0 && self->verifies)
        fits = is_true_of(node, s_verified);
    if (fits <= 0)
        Py_CLEAR(node);
    return node;
}

/* ``Tree.stand_on`` and the count of replays. */
static int stand_on(const Steps *self, PyObject *tree, TreeView *view, PyObject *node)
{
    if (PyList_GET_SIZE(view->path) == 0 && PyList_GET_SIZE(view->warm) == 0) {
        PyObject *mark = PyObject_CallNoArgs(self->steps_begun);
        int failed = mark == NULL || PyObject_SetAttr(tree, s_mark, mark) < 0;
        Py_XDECREF(mark);
        if (failed)
            return -1;
    }
    if (PyList_Append(view->path, node) < 0)
        return -1;
    PyObject *known = PyDict_GetItemWithError(view->times, self->function);
    PyObject *more = PyErr_Occurred() ? NULL : PyLong_FromLong(known == NULL ? 1 : PyLong_AsLong(known) + 1);
    int failed = more == NULL || PyDict_SetItem(view->times, self->function, more) < 0;
    Py_XDECREF(more);
    if (failed || PyObject_SetAttr(tree, s_current, node) < 0 || PyObject_SetAttr(tree, s_pool_is_at, Py_None) < 0)
        return -1;
    PyObject *replays = PyObject_GetAttr(self->counters, s_replays);
    more = replays == NULL ? NULL : PyLong_FromLongLong(PyLong_AsLongLong(replays) + 1);
    failed = more == NULL || PyObject_SetAttr(self->counters, s_replays, more) < 0;
    Py_XDECREF(replays);
    Py_XDECREF(more);
    return failed ? -1 : 0;
}

PyObject *list_of(PyObject *const *items, Py_ssize_t count)
{
    PyObject *list = PyList_New(count);
    for (Py_ssize_t i = 0; list != NULL && i < count; i++)
        PyList_SET_ITEM(list, i, Py_NewRef(items[i]));
    return list;
}

/* ``replay(node, tree, values, leaves)`` or, without a node, ``ready(entry, values, leaves)``, in Python. */
static PyObject *in_python(const Steps *self, PyObject *node, PyObject *tree, PyObject *const *values, PyObject *leaves)
{
    PyObject *tuple = PyTuple_New(self->count), *result = NULL;
    for (Py_ssize_t i = 0; tuple != NULL && i < self->count; i++)
        PyTuple_SET_ITEM(tuple, i, Py_NewRef(values[i]));
    if (tuple != NULL && node != NULL) {
        PyObject *args[] = {node, tree, tuple, leaves};
        result = PyObject_Vectorcall(self->replay, args, 4, NULL);
    } else if (tuple != NULL) {
        PyObject *args[] = {self->entry, tuple, leaves};
        result = PyObject_Vectorcall(self->ready, args, 3, NULL);
    }
    Py_XDECREF(tuple);
    return result;
}

/* The facts hold: 1. 0: ask the check. ``*wanted``: facts are to be made once it holds, as there are none or others. */
static int known_to_hold(PyObject *checker, const uint64_t *addresses, Py_ssize_t count, int *wanted)
{
    PyObject *facts = PyObject_GetAttr(checker, s_facts);
    if (facts == NULL)
        return -1;
    int holds = is_facts(facts) && facts_hold(facts, addresses, count);
    *wanted = !holds && facts != Py_False;
    Py_DECREF(facts);
    return holds;
}

/* The check in Python. Facts are made while it holds, never before. */
static int checked(PyObject *check, PyObject *checker, PyObject *leaves, int wanted)
{
    int verdict = truth_of(PyObject_CallOneArg(check, leaves));
    if (verdict == 0 && wanted) {
        PyObject *made = PyObject_CallMethodNoArgs(checker, s_see);
        if (made == NULL)
            return -1;
        Py_DECREF(made);
    }
    return verdict < 0 ? -1 : !verdict;
}

/* ``Node.state_holds`` between two full comparisons: 1; 0: it is time for one, or modules changed. */
static int is_between(const Steps *self, PyObject *node)
{
    PyObject *unchecked = PyObject_GetAttr(node, s_unchecked), *registered = NULL, *now = NULL, *more = NULL;
    long since = unchecked == NULL ? -1 : PyLong_AsLong(unchecked);
    int between = since < 0 ? -1 : since < self->sampled;
    if (between > 0) {
        registered = PyObject_GetAttr(node, s_registered);
        now = registered == NULL ? NULL : PyObject_CallNoArgs(self->registrations);
        between = now == NULL ? -1 : PyObject_RichCompareBool(registered, now, Py_EQ);
    }
    if (between > 0) {
        more = PyLong_FromLong(since + 1);
        between = more == NULL || PyObject_SetAttr(node, s_unchecked, more) < 0 ? -1 : 1;
    }
    Py_XDECREF(unchecked);
    Py_XDECREF(registered);
    Py_XDECREF(now);
    Py_XDECREF(more);
    return between;
}

/* The state is as recorded: 1; it moved: 0; -1. Sets ``*leaves`` where it made the list. */
static int state_holds(
    const Steps *self, PyObject *node, PyObject *const *tensors, const uint64_t *addresses, PyObject **leaves)
{
    PyObject *check = PyObject_GetAttr(node, s_check);
    if (check == NULL || check == self->ok) {
        Py_XDECREF(check);
        return check == NULL ? -1 : 1;
    }
    int holds = -1, wanted = 0;
    PyObject *checker = PyObject_GetAttr(node, s_checker);
    if (checker != NULL)
        holds = self->sampled ? is_between(self, node) : known_to_hold(checker, addresses, self->tensors, &wanted);
    if (holds == 0) {
        *leaves = list_of(tensors, self->tensors);
        if (*leaves == NULL)
            holds = -1;
        else if (self->sampled)
            holds = truth_of(PyObject_CallMethodOneArg(node, s_state_holds, *leaves));
        else
            holds = checked(check, checker, *leaves, wanted);
    }
    Py_XDECREF(checker);
    Py_DECREF(check);
    return holds;
}

/* From here on it is the call. */
static PyObject *run(
    const Steps *self, PyObject *node, NodeView *view, PyObject *tree, TreeView *at, PyObject *const *values,
    PyObject *const *tensors, const uint64_t *addresses)
{
    PyObject *leaves = NULL, *recording = NULL, *replay = NULL, *result = NULL, *pool = NULL;
    int holds = state_holds(self, node, tensors, addresses, &leaves);
    if (holds < 0)
        goto end;
    if (!holds) {
        result = in_python(self, NULL, NULL, values, leaves);
        goto end;
    }
    int to_python = PyList_GET_SIZE(at->lingering) || (view->source == Py_None && view->several == Py_None);
    if (!to_python && view->source == Py_None)
        to_python = copies_outputs(view);
    if (to_python < 0)
        goto end;
    if (to_python) {
        leaves = leaves == NULL ? list_of(tensors, self->tensors) : leaves;
        result = leaves == NULL ? NULL : in_python(self, node, tree, values, leaves);
        goto end;
    }
    recording = PyObject_GetAttr(node, s_recording);
    replay = recording == NULL ? NULL : PyObject_GetAttr(recording, s_replay);
    if (replay == NULL)
        goto end;
    if (is_launch(replay)) {
        if (launch_run(replay, tensors, addresses, self->tensors) < 0)
            goto end;
    } else {
        leaves = leaves == NULL ? list_of(tensors, self->tensors) : leaves;
        PyObject *done = leaves == NULL ? NULL : PyObject_CallOneArg(replay, leaves);
        if (done == NULL)
            goto end;
        Py_DECREF(done);
    }
    if (view->source != Py_None) {
        result = single_output(view);
        if (result == NULL && !PyErr_Occurred())
            result = PyObject_CallMethodNoArgs(view->outputs, s_build_single);
    } else {
        pool = PyObject_GetAttr(tree, s_pool);
        result = pool == NULL ? NULL : several_outputs(view, pool);
    }
    if (result != NULL && stand_on(self, tree, at, node) < 0)
        Py_CLEAR(result);
    if (result != NULL && self->attach != Py_None) {
        leaves = leaves == NULL ? list_of(tensors, self->tensors) : leaves;
        PyObject *args[] = {result, leaves, node};
        PyObject *attached = leaves == NULL ? NULL : PyObject_Vectorcall(self->attach, args, 3, NULL);
        Py_SETREF(result, attached);
    }
end:
    Py_XDECREF(pool);
    Py_XDECREF(leaves);
    Py_XDECREF(recording);
    Py_XDECREF(replay);
    return result;
}

PyObject *steps_take(
    const Steps *self, PyObject *tree, PyObject *const *values, PyObject *const *tensors, const uint64_t *addresses)
{
    PyObject *result = NULL, *node = NULL;
    NodeView *view = NULL;
    TreeView *at = (TreeView *)view_of(tree, &TreeViewType);
    if (at == NULL)
        return NULL;
    int begun = begins(self, tree, at);
    node = begun <= 0 ? NULL : fitting(self, tree, at, addresses, &view);
    if (node != NULL)
        result = run(self, node, view, tree, at, values, tensors, addresses);
    else if (!PyErr_Occurred())
        result = Py_NewRef(self->miss);
    Py_XDECREF(node);
    Py_XDECREF(view);
    Py_DECREF(at);
    return result;
}

int add_steps(PyObject *module)
{
    (void)module;
    NAMES(INTERN)
    return 0;
}
