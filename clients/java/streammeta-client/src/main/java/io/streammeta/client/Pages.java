package io.streammeta.client;

import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.CompletableFuture;
import java.util.function.Consumer;
import java.util.function.Function;

/** A listing that is read page by page. Nothing is requested before one of the methods is called. */
public final class Pages<T> {
    private final Function<String, CompletableFuture<Page<T>>> fetch;

    Pages(Function<String, CompletableFuture<Page<T>>> fetch) {
        this.fetch = fetch;
    }

    /** Requests one page. The token is empty for the first one. */
    public CompletableFuture<Page<T>> page(String token) {
        return fetch.apply(token);
    }

    /** Requests all pages one after the other, and passes each item on as soon as its page is there. */
    public CompletableFuture<Void> forEach(Consumer<? super T> action) {
        CompletableFuture<Void> done = new CompletableFuture<>();
        continueAt("", action, done);
        return done;
    }

    /** Requests all pages and returns their items. */
    public CompletableFuture<List<T>> toList() {
        List<T> items = new ArrayList<>();
        return forEach(items::add).thenApply(none -> items);
    }

    private void continueAt(String token, Consumer<? super T> action, CompletableFuture<Void> done) {
        page(token).whenComplete((page, error) -> {
            try {
                if (error != null) {
                    done.completeExceptionally(error);
                    return;
                }
                page.items().forEach(action);
            } catch (RuntimeException failed) { // of the caller's action
                done.completeExceptionally(failed);
                return;
            }
            if (page.isLast()) {
                done.complete(null);
            } else if (!done.isDone()) { // else the caller has cancelled it
                continueAt(page.nextToken(), action, done);
            }
        });
    }
}
