package io.streammeta.pulsar;

import java.io.BufferedOutputStream;
import java.io.IOException;
import java.io.OutputStream;
import java.nio.channels.Channels;
import java.nio.channels.FileChannel;
import java.nio.channels.OverlappingFileLockException;
import java.nio.file.DirectoryStream;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.StandardOpenOption;
import java.util.zip.CRC32C;
import java.util.zip.CheckedOutputStream;

/**
 * Bytes of a data object on the local disk until they are uploaded, so that a copy needs no memory of its size. Closing
 * deletes the file. The files of processes that were killed are deleted by the next {@link #deleteAbandoned}.
 */
final class ScratchFile extends OutputStream {
    private static final String PREFIX = "streammeta-offload-";

    private final Path path;
    private final FileChannel channel;
    private final CRC32C checksum = new CRC32C();
    private final OutputStream out;
    private long size;

    /** Creates an empty file in a folder. */
    ScratchFile(Path folder) throws IOException {
        path = Files.createTempFile(folder, PREFIX, ".data");
        channel = FileChannel.open(path, StandardOpenOption.WRITE);
        channel.lock(); // says to other processes that the file is in use
        out = new CheckedOutputStream(new BufferedOutputStream(Channels.newOutputStream(channel), 1 << 16), checksum);
    }

    /** Deletes the files in a folder that no process uses. */
    static void deleteAbandoned(Path folder) throws IOException {
        try (DirectoryStream<Path> files = Files.newDirectoryStream(folder, PREFIX + "*.data")) {
            for (Path file : files) {
                if (isAbandoned(file)) {
                    Files.deleteIfExists(file);
                }
            }
        }
    }

    private static boolean isAbandoned(Path file) throws IOException {
        try (FileChannel channel = FileChannel.open(file, StandardOpenOption.WRITE)) {
            return channel.tryLock() != null;
        } catch (OverlappingFileLockException usedHere) {
            return false;
        }
    }

    @Override
    public void write(int value) throws IOException {
        out.write(value);
        size++;
    }

    @Override
    public void write(byte[] data, int offset, int length) throws IOException {
        out.write(data, offset, length);
        size += length;
    }

    @Override
    public void flush() throws IOException {
        out.flush();
    }

    Path path() {
        return path;
    }

    /** Returns the number of bytes that were written. */
    long size() {
        return size;
    }

    /** Returns the CRC-32C of the bytes that were written. */
    long crc32c() {
        return checksum.getValue();
    }

    @Override
    public void close() throws IOException {
        try (channel) {
            Files.deleteIfExists(path);
        }
    }
}
