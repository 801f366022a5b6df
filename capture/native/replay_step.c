/* Steps: what a call does once its arguments fit, from the tree on: the second half of ``capture/_shortcut.py``. */
#include "native.h"

#define NAMES(X) X(begin_call) X(find) X(state_holds) X(see) X(replay) X(build_single)
NAMES(DECLARE)

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

/* The view of a node: borrowed, or NULL with an exception. */
static NodeView *view_of(PyObject *node)
{
    PyObject *view = is_of(node, slots.Node.type) ? SLOT(node, Node, view) : NULL;
    return view != NULL && is_of(view, &NodeViewType) ? (NodeView *)view : NULL;
}

/* Some output of the node is still used. */
static int has_used_outputs(PyObject *node)
{
    NodeView *view = view_of(node);
    if (view == NULL)
        return -1;
    Py_INCREF(view);
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

/* The lists and the dict of a tree: never other ones, so that they are borrowed as long as the tree is there. */
typedef struct {
    PyObject *path, *warm, *buried, *lingering, *kept, *times;
} Lists;

static int lists_of(PyObject *tree, Lists *lists)
{
    if (!is_of(tree, slots.Tree.type))
        return -1;
#define TAKE(name) \
    if ((lists->name = SLOT(tree, Tree, name)) == NULL) \
        return -1;
    TAKE(path) TAKE(warm) TAKE(buried) TAKE(lingering) TAKE(kept) TAKE(times)
    return 0;
}

/* ``Tree.begin_call`` where the path ends because nothing on it is used any more: 1, else 0 with nothing done. */
static int ends_by_itself(PyObject *tree, const Lists *at)
{
    PyObject *path = at->path;
    if (PyList_GET_SIZE(at->kept))
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
    PyObject *root = SLOT(tree, Tree, root);
    if (root == NULL || PyList_SetSlice(path, 0, PyList_GET_SIZE(path), NULL) < 0)
        return -1;
    PUT(tree, Tree, current, root);
    PyDict_Clear(at->times);
    return 1;
}

/* Outputs are still used, but the step goes on as it is: it ends by marks alone, and no mark came since. */
static int goes_on(const Steps *self, PyObject *tree, const Lists *at)
{
    PyObject *begun = SLOT(self->marks, Marks, begun), *mark = SLOT(tree, Tree, mark);
    int same = begun == NULL || mark == NULL ? -1 : PyObject_IsTrue(begun);
    if (same > 0)
        same = begun == mark ? 1 : PyObject_RichCompareBool(begun, mark, Py_EQ);
    if (same <= 0)
        return same;
    PyObject *times = PyDict_GetItemWithError(at->times, self->function);
    return times == NULL ? (PyErr_Occurred() ? -1 : 1) : PyObject_RichCompareBool(times, self->limit, Py_LE);
}

/* End the step if it is over. 1: the way goes on; 0: it does not fit. */
static int begins(const Steps *self, PyObject *tree, const Lists *at)
{
    if (!PyList_GET_SIZE(at->warm) && !PyList_GET_SIZE(at->buried) && !PyList_GET_SIZE(at->lingering)) {
        if (PyList_GET_SIZE(at->path) == 0)
            return 1;
        int ended = ends_by_itself(tree, at);
        ended = ended ? ended : goes_on(self, tree, at);
        if (ended)
            return ended;
    }
    PyObject *args[] = {tree, self->function, self->limit, self->number};
    PyObject *done = PyObject_VectorcallMethod(s_begin_call, args, 4, NULL);
    if (done == NULL)
        return -1;
    Py_DECREF(done);
    return PyList_GET_SIZE(at->warm) == 0;
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
            pool = Py_XNewRef(SLOT(tree, Tree, pool));
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
    const Steps *self, PyObject *tree, const Lists *at, const uint64_t *addresses, NodeView **view)
{
    PyObject *current = SLOT(tree, Tree, current);
    PyObject *followers = current != NULL && is_of(current, slots.Node.type) ? SLOT(current, Node, followers) : NULL;
    PyObject *node = followers == NULL ? NULL : Py_XNewRef(PyDict_GetItemWithError(followers, self->number));
    if (node == NULL || (*view = view_of(node)) == NULL) {
        Py_XDECREF(node);
        return NULL;
    }
    Py_INCREF(*view);
    int fits = PyList_GET_SIZE(at->path) ? stands(*view, tree, addresses, self->tensors) : 1;
    if (fits > 0)
        fits = may_run(*view);
    if (fits > 0 && self->verifies)
        fits = truth_of(Py_XNewRef(SLOT(node, Node, verified)));
    if (fits <= 0)
        Py_CLEAR(node);
    return node;
}

/* One more in an attribute that counts: 0, -1. */
static int count_up(PyObject *object, Py_ssize_t at)
{
    PyObject *known = slot_at(object, at);
    PyObject *more = known == NULL ? NULL : PyLong_FromLongLong(PyLong_AsLongLong(known) + 1);
    if (more == NULL)
        return -1;
    put(object, at, more);
    Py_DECREF(more);
    return 0;
}

/* ``Tree.stand_on`` and the count of replays. */
static int stand_on(const Steps *self, PyObject *tree, const Lists *at, PyObject *node)
{
    if (PyList_GET_SIZE(at->path) == 0 && PyList_GET_SIZE(at->warm) == 0) {
        PyObject *begun = SLOT(self->marks, Marks, begun);
        if (begun == NULL)
            return -1;
        PUT(tree, Tree, mark, begun);
    }
    if (PyList_Append(at->path, node) < 0)
        return -1;
    PyObject *known = PyDict_GetItemWithError(at->times, self->function);
    PyObject *more = PyErr_Occurred() ? NULL : PyLong_FromLong(known == NULL ? 1 : PyLong_AsLong(known) + 1);
    int failed = more == NULL || PyDict_SetItem(at->times, self->function, more) < 0;
    Py_XDECREF(more);
    if (failed)
        return -1;
    PUT(tree, Tree, current, node);
    PUT(tree, Tree, pool_is_at, Py_None);
    return count_up(self->counters, slots.Counters.replays);
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
    PyObject *facts = is_of(checker, slots.Checker.type) ? Py_XNewRef(SLOT(checker, Checker, facts)) : NULL;
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
    PyObject *unchecked = SLOT(node, Node, unchecked);
    long since = unchecked == NULL ? -1 : PyLong_AsLong(unchecked);
    if (since < 0 || since >= self->sampled)
        return since < 0 ? -1 : 0;
    PyObject *now = PyObject_CallNoArgs(self->registrations);
    PyObject *registered = now == NULL ? NULL : SLOT(node, Node, registered);
    int between = registered == NULL ? -1 : PyObject_RichCompareBool(registered, now, Py_EQ);
    Py_XDECREF(now);
    return between > 0 && count_up(node, slots.Node.unchecked) < 0 ? -1 : between;
}

/* The state is as recorded: 1; it moved: 0; -1. Sets ``*leaves`` where it made the list. */
static int state_holds(
    const Steps *self, PyObject *node, PyObject *const *tensors, const uint64_t *addresses, PyObject **leaves)
{
    PyObject *check = SLOT(node, Node, check), *checker = SLOT(node, Node, checker);
    if (check == NULL || checker == NULL || check == self->ok)
        return check == NULL || checker == NULL ? -1 : 1;
    int wanted = 0;
    Py_INCREF(check);
    Py_INCREF(checker);
    int holds = self->sampled ? is_between(self, node) : known_to_hold(checker, addresses, self->tensors, &wanted);
    if (holds == 0) {
        *leaves = list_of(tensors, self->tensors);
        if (*leaves == NULL)
            holds = -1;
        else if (self->sampled)
            holds = truth_of(PyObject_CallMethodOneArg(node, s_state_holds, *leaves));
        else
            holds = checked(check, checker, *leaves, wanted);
    }
    Py_DECREF(checker);
    Py_DECREF(check);
    return holds;
}

/* From here on it is the call. */
static PyObject *run(
    const Steps *self, PyObject *node, NodeView *view, PyObject *tree, const Lists *at, PyObject *const *values,
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
    recording = Py_XNewRef(SLOT(node, Node, recording));
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
        pool = Py_XNewRef(SLOT(tree, Tree, pool));
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
    Lists at;
    if (lists_of(tree, &at) < 0)
        return NULL;
    int begun = begins(self, tree, &at);
    node = begun <= 0 ? NULL : fitting(self, tree, &at, addresses, &view);
    if (node != NULL)
        result = run(self, node, view, tree, &at, values, tensors, addresses);
    else if (!PyErr_Occurred())
        result = Py_NewRef(self->miss);
    Py_XDECREF(node);
    Py_XDECREF(view);
    return result;
}

int are_seen(const Steps *self)
{
    return is_of(self->entry, slots.Entry.type) && is_of(self->counters, slots.Counters.type) &&
           is_of(self->marks, slots.Marks.type);
}

int add_steps(PyObject *module)
{
    (void)module;
    NAMES(INTERN)
    return 0;
}
