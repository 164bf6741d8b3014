package io.streammeta.automq;

import com.automq.stream.api.exceptions.ErrorCode;
import com.automq.stream.api.exceptions.StreamClientException;
import com.automq.stream.s3.exceptions.CompactedObjectsNotFoundException;
import com.automq.stream.s3.exceptions.ObjectNotCommittedException;
import io.streammeta.client.StreammetaClient;
import io.streammeta.client.errors.ControllerUnavailableException;
import io.streammeta.client.errors.RejectedException;
import io.streammeta.client.errors.StreamNotClosedException;
import java.time.Duration;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.Executor;
import java.util.concurrent.TimeUnit;
import java.util.function.Function;
import java.util.function.Supplier;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;

/**
 * The calls of the managers. s3stream expects that a call waits, without a limit, until the controllers answer, and that
 * it fails with exceptions of s3stream or of its host.
 */
final class Calls {
    private static final Logger LOG = LoggerFactory.getLogger(Calls.class);
    private static final Duration FIRST_DELAY = Duration.ofMillis(20);
    private static final Duration LAST_DELAY = Duration.ofSeconds(1);

    private final HostErrors errors;

    Calls(HostErrors errors) {
        this.errors = errors;
    }

    /** Calls until there is an answer. A stream that is still open elsewhere is waited for, too. */
    <T> CompletableFuture<T> call(Supplier<CompletableFuture<T>> attempt) {
        return call(attempt, errors::translate);
    }

    /** Calls for a commit. Objects that are gone, or not committed, have exceptions of s3stream. */
    <T> CompletableFuture<T> commit(Supplier<CompletableFuture<T>> attempt) {
        return call(attempt, rejection -> switch (rejection.code()) {
            case OBJECT_NOT_EXIST, COMPACTED_OBJECTS_NOT_FOUND -> caused(
                    new CompactedObjectsNotFoundException(), rejection);
            case OBJECT_NOT_COMMITTED -> caused(new ObjectNotCommittedException(), rejection);
            default -> errors.translate(rejection);
        });
    }

    /** Calls for closing a stream. s3stream knows the error of one that has another owner. */
    <T> CompletableFuture<T> close(Supplier<CompletableFuture<T>> attempt) {
        return call(attempt, rejection -> switch (rejection.code()) {
            case STREAM_FENCED -> new StreamClientException(
                    ErrorCode.EXPIRED_STREAM_EPOCH, rejection.getMessage(), rejection);
            default -> errors.translate(rejection);
        });
    }

    private <T> CompletableFuture<T> call(
            Supplier<CompletableFuture<T>> attempt, Function<RejectedException, RuntimeException> translation) {
        return attempt(attempt, translation, FIRST_DELAY);
    }

    private <T> CompletableFuture<T> attempt(
            Supplier<CompletableFuture<T>> attempt,
            Function<RejectedException, RuntimeException> translation,
            Duration delay) {
        return attempt.get().exceptionallyCompose(failure -> {
            Throwable error = StreammetaClient.cause(failure);
            if (error instanceof ControllerUnavailableException || error instanceof StreamNotClosedException) {
                LOG.warn("a call failed, it is repeated in {} ms: {}", delay.toMillis(), error.getMessage());
                return CompletableFuture.supplyAsync(
                                () -> attempt(attempt, translation, longer(delay)), after(delay))
                        .thenCompose(Function.identity());
            }
            return CompletableFuture.failedFuture(
                    error instanceof RejectedException rejection ? translation.apply(rejection) : error);
        });
    }

    /** Asks again, ever more slowly, until an answer is complete. */
    static <T> CompletableFuture<T> poll(Supplier<CompletableFuture<T>> question, Function<T, Boolean> isComplete) {
        return poll(question, isComplete, FIRST_DELAY);
    }

    private static <T> CompletableFuture<T> poll(
            Supplier<CompletableFuture<T>> question, Function<T, Boolean> isComplete, Duration delay) {
        return question.get().thenCompose(answer -> isComplete.apply(answer)
                ? CompletableFuture.completedFuture(answer)
                : CompletableFuture.supplyAsync(() -> poll(question, isComplete, longer(delay)), after(delay))
                        .thenCompose(Function.identity()));
    }

    private static Duration longer(Duration delay) {
        Duration next = delay.multipliedBy(2);
        return next.compareTo(LAST_DELAY) < 0 ? next : LAST_DELAY;
    }

    static Executor after(Duration delay) {
        return CompletableFuture.delayedExecutor(delay.toMillis(), TimeUnit.MILLISECONDS);
    }

    private static <E extends RuntimeException> E caused(E error, RejectedException rejection) {
        error.initCause(rejection);
        return error;
    }
}
