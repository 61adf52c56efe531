// SPDX-License-Identifier: Apache-2.0
/* A thread that works through what it is given, in that order, while the giver goes on.
 *
 * It knows nothing of Python, so it needs no interpreter and takes no signals. It begins with the first entry. A queue
 * that is full makes the giver wait. In a forked child there is no thread: nothing may be given or awaited there.
 */
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <unistd.h>

#define QUEUE_LENGTH 64

typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t given, done;
    pthread_t thread;
    pid_t pid; /* of the process that the thread is in; 0: it has not begun */
    int is_stopping;
    int code;          /* the first of the results other than 0 that was not taken */
    size_t first, end; /* numbers of the entries that are under way or to come */
    void *entries[QUEUE_LENGTH];
    int (*work)(void *entry);
} queue_t;

typedef int (*is_entry_t)(const void *entry, const void *key);

static void queue_init(queue_t *queue, int (*work)(void *entry))
{
    pthread_mutex_init(&queue->lock, NULL);
    pthread_cond_init(&queue->given, NULL);
    pthread_cond_init(&queue->done, NULL);
    queue->work = work;
}

static void *queue_run(void *argument)
{
    queue_t *queue = argument;
    int code;
    pthread_mutex_lock(&queue->lock);
    while (1) {
        while (queue->first == queue->end && !queue->is_stopping)
            pthread_cond_wait(&queue->given, &queue->lock);
        if (queue->is_stopping)
            break;
        pthread_mutex_unlock(&queue->lock);
        code = queue->work(queue->entries[queue->first % QUEUE_LENGTH]);
        pthread_mutex_lock(&queue->lock);
        if (queue->code == 0)
            queue->code = code;
        queue->first++;
        pthread_cond_broadcast(&queue->done);
    }
    pthread_mutex_unlock(&queue->lock);
    return NULL;
}

/* Starts the thread, once; 0 if there is none. Signals are for threads of Python. */
static int queue_begin(queue_t *queue)
{
    sigset_t all, before;
    if (queue->pid != 0)
        return 1;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    if (pthread_create(&queue->thread, NULL, queue_run, queue) == 0)
        queue->pid = getpid();
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return queue->pid != 0;
}

/* Returns whether the entry was taken: not where no thread can be started. */
static int queue_give(queue_t *queue, void *entry)
{
    int has_begun;
    pthread_mutex_lock(&queue->lock);
    has_begun = queue_begin(queue);
    if (has_begun) {
        while (queue->end - queue->first == QUEUE_LENGTH)
            pthread_cond_wait(&queue->done, &queue->lock);
        queue->entries[queue->end++ % QUEUE_LENGTH] = entry;
        pthread_cond_signal(&queue->given);
    }
    pthread_mutex_unlock(&queue->lock);
    return has_begun;
}

/* Blocks until the last entry that `is_entry` accepts is done; NULL accepts each. */
static void queue_await(queue_t *queue, is_entry_t is_entry, const void *key)
{
    size_t last;
    if (queue->pid == 0) /* most engines never give anything */
        return;
    pthread_mutex_lock(&queue->lock);
    for (last = queue->end; last > queue->first; last--)
        if (is_entry == NULL || is_entry(queue->entries[(last - 1) % QUEUE_LENGTH], key))
            break;
    while (queue->first < last)
        pthread_cond_wait(&queue->done, &queue->lock);
    pthread_mutex_unlock(&queue->lock);
}

/* Returns the first result other than 0, once. */
static int queue_take_code(queue_t *queue)
{
    int code;
    if (queue->pid == 0)
        return 0;
    pthread_mutex_lock(&queue->lock);
    code = queue->code;
    queue->code = 0;
    pthread_mutex_unlock(&queue->lock);
    return code;
}

/* Ends the thread; nothing may be left to do. */
static void queue_stop(queue_t *queue)
{
    if (queue->pid != getpid())
        return;
    pthread_mutex_lock(&queue->lock);
    queue->is_stopping = 1;
    pthread_cond_signal(&queue->given);
    pthread_mutex_unlock(&queue->lock);
    pthread_join(queue->thread, NULL);
    queue->pid = 0;
}
