package io.streammeta.client;

import io.streammeta.client.errors.ErrorCode;
import io.streammeta.v1.CommitStreamObjectResponse;
import io.streammeta.v1.CommitStreamSetObjectResponse;
import java.util.List;

/**
 * Outcome of a commit.
 *
 * @param error {@link ErrorCode#NONE} if it is made
 * @param rangeErrors the outcome of each range. May be empty if none was rejected
 * @param streamObjectErrors the outcome of each stream object
 * @param putResults the current value of each key that the commit puts
 * @param trimErrors the outcome of each trim
 * @param trimStartOffsets where each trimmed stream starts now
 */
public record CommitVerdict(
        ErrorCode error,
        List<ErrorCode> rangeErrors,
        List<ErrorCode> streamObjectErrors,
        List<PutResult> putResults,
        List<ErrorCode> trimErrors,
        List<Long> trimStartOffsets) {
    static CommitVerdict of(CommitStreamSetObjectResponse answer) {
        return new CommitVerdict(
                Wire.code(answer.getError()),
                Wire.codes(answer.getRangeErrorsList()),
                Wire.codes(answer.getStreamObjectErrorsList()),
                answer.getKvResultsList().stream().map(PutResult::of).toList(),
                Wire.codes(answer.getTrimErrorsList()),
                List.copyOf(answer.getTrimStartOffsetsList()));
    }

    static CommitVerdict of(CommitStreamObjectResponse answer) {
        return new CommitVerdict(
                Wire.code(answer.getError()),
                List.of(),
                List.of(),
                answer.getKvResultsList().stream().map(PutResult::of).toList(),
                Wire.codes(answer.getTrimErrorsList()),
                List.copyOf(answer.getTrimStartOffsetsList()));
    }

    /** Returns whether the commit is made. */
    public boolean isCommitted() {
        return error.isSuccess();
    }

    /** Returns this verdict, or throws the error of a rejected commit, such as {@code "object 7"}. */
    public CommitVerdict requireCommitted(String subject) {
        if (!isCommitted()) {
            throw error.rejection(subject);
        }
        return this;
    }
}
