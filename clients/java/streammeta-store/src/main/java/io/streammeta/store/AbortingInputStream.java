package io.streammeta.store;

import java.io.FilterInputStream;
import java.io.IOException;
import software.amazon.awssdk.core.ResponseInputStream;

/** The body of an answer, whose connection is dropped if it is closed before its end, and checked to be complete. */
final class AbortingInputStream extends FilterInputStream {
    private final ResponseInputStream<?> body;
    private long left;

    AbortingInputStream(ResponseInputStream<?> body, long size) {
        super(body);
        this.body = body;
        this.left = size;
    }

    @Override
    public int read() throws IOException {
        byte[] one = new byte[1];
        return read(one, 0, 1) < 0 ? -1 : one[0] & 0xff;
    }

    @Override
    public int read(byte[] bytes, int offset, int length) throws IOException {
        int count = super.read(bytes, offset, length);
        if (count < 0 && left > 0) {
            throw new IOException("the store ended an answer " + left + " bytes early");
        }
        left -= Math.max(0, count);
        return count;
    }

    @Override
    public long skip(long count) throws IOException {
        long skipped = super.skip(count);
        left -= skipped;
        return skipped;
    }

    @Override
    public void close() throws IOException {
        // To read the rest, perhaps of a GiB, would take longer than a new connection.
        if (left > 0) {
            body.abort();
        } else {
            body.close();
        }
    }

    @Override
    public boolean markSupported() {
        return false;
    }
}
