package io.streammeta.store;

import java.io.FilterInputStream;
import java.io.IOException;
import java.io.InputStream;

/** The first bytes of another stream. */
final class BoundedInputStream extends FilterInputStream {
    private long left;

    BoundedInputStream(InputStream in, long size) {
        super(in);
        this.left = size;
    }

    @Override
    public int read() throws IOException {
        byte[] one = new byte[1];
        return read(one, 0, 1) < 0 ? -1 : one[0] & 0xff;
    }

    @Override
    public int read(byte[] bytes, int offset, int length) throws IOException {
        if (left <= 0) {
            return length == 0 ? 0 : -1;
        }
        int count = super.read(bytes, offset, (int) Math.min(length, left));
        left -= Math.max(0, count);
        return count;
    }

    @Override
    public long skip(long count) throws IOException {
        long skipped = super.skip(Math.min(count, left));
        left -= skipped;
        return skipped;
    }

    @Override
    public int available() throws IOException {
        return (int) Math.min(super.available(), left);
    }

    @Override
    public boolean markSupported() {
        return false;
    }
}
