package io.streammeta.pulsar;

import java.util.concurrent.Callable;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.Executor;
import java.util.concurrent.RejectedExecutionException;

/** Blocking work on other threads. */
final class Tasks {
    private Tasks() {}

    /** Runs a task on an executor. All its failures, and a closed executor, fail the future. */
    static <T> CompletableFuture<T> run(Executor executor, Callable<T> task) {
        CompletableFuture<T> result = new CompletableFuture<>();
        try {
            executor.execute(() -> {
                try {
                    result.complete(task.call());
                } catch (Throwable error) { // a caller that never hears of it would wait forever
                    result.completeExceptionally(error);
                }
            });
        } catch (RejectedExecutionException closed) {
            result.completeExceptionally(closed);
        }
        return result;
    }
}
