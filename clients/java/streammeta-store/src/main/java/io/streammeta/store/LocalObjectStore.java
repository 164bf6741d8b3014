package io.streammeta.store;

import java.io.IOException;
import java.io.InputStream;
import java.io.UncheckedIOException;
import java.net.URLDecoder;
import java.nio.ByteBuffer;
import java.nio.channels.Channels;
import java.nio.channels.FileChannel;
import java.nio.charset.StandardCharsets;
import java.nio.file.DirectoryNotEmptyException;
import java.nio.file.FileAlreadyExistsException;
import java.nio.file.Files;
import java.nio.file.LinkOption;
import java.nio.file.NoSuchFileException;
import java.nio.file.Path;
import java.nio.file.StandardCopyOption;
import java.nio.file.StandardOpenOption;
import java.nio.file.attribute.BasicFileAttributes;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collection;
import java.util.Comparator;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.UUID;
import java.util.stream.Stream;

/**
 * Objects as files under one directory, for one machine and for tests. The layout is that of the Python product:
 * {@code objects/KEY} and {@code .tmp/}. A file is written and synced in {@code .tmp/} and then moved, so readers never
 * see half an object.
 */
final class LocalObjectStore implements ObjectStore {
    /** Each try loses only to a concurrent delete of the same empty directory. */
    private static final int MOVE_TRIES = 20;

    private final Path root;
    private final Path objects;

    LocalObjectStore(Path root) {
        this.root = root;
        this.objects = root.resolve("objects");
    }

    static LocalObjectStore of(String address) {
        String path = address.substring("file://".length());
        if (path.contains("?") || path.contains("#")) {
            throw new IllegalArgumentException(
                    "directory address is '" + address + "', expected file:///absolute/directory");
        }
        return new LocalObjectStore(
                Path.of(URLDecoder.decode(path.replace("+", "%2B"), StandardCharsets.UTF_8)));
    }

    @Override
    public void check() {
        if (!Files.isDirectory(root)) {
            throw new BucketNotFoundException(root.toString());
        }
        if (!Files.isWritable(root)) {
            throw new AccessDeniedException(
                    "directory " + root + " can't be written. Fix its owner or mode", null);
        }
    }

    @Override
    public void put(String key, ByteBuffer data) {
        write(key, channel -> writeAll(channel, data.duplicate()), false);
    }

    @Override
    public void put(String key, Path file) {
        write(
                key,
                channel -> {
                    try (FileChannel source = FileChannel.open(file, StandardOpenOption.READ)) {
                        long size = source.size();
                        for (long at = 0; at < size; ) {
                            at += source.transferTo(at, size - at, channel);
                        }
                    }
                },
                false);
    }

    @Override
    public void putIfAbsent(String key, ByteBuffer data) {
        write(key, channel -> writeAll(channel, data.duplicate()), true);
    }

    @Override
    public byte[] get(String key) {
        Path path = pathOf(key);
        return call(key, () -> Files.readAllBytes(path));
    }

    @Override
    public byte[] getRange(String key, long start, long end) {
        try (InputStream bytes = openRange(key, start, end)) {
            return bytes.readAllBytes();
        } catch (IOException error) {
            throw unavailable(key, error);
        }
    }

    @Override
    public InputStream openRange(String key, long start, long end) {
        Keys.checkRange(start, end);
        Path path = pathOf(key);
        return call(key, () -> {
            FileChannel channel = FileChannel.open(path, StandardOpenOption.READ, LinkOption.NOFOLLOW_LINKS);
            long size = channel.size();
            if (start >= size) {
                channel.close();
                throw new RangeNotSatisfiableException(key, start);
            }
            channel.position(start);
            return new BoundedInputStream(Channels.newInputStream(channel), Math.min(end, size) - start);
        });
    }

    @Override
    public ObjectInfo head(String key) {
        Path path = pathOf(key);
        return call(key, () -> describe(key, path));
    }

    @Override
    public Stream<ObjectInfo> list(String prefix) {
        check();
        List<ObjectInfo> found = new ArrayList<>();
        call(prefix, () -> {
            if (!Files.isDirectory(objects)) {
                return null; // the store is new
            }
            try (Stream<Path> files = Files.walk(objects)) {
                for (Path file : files.filter(path -> Files.isRegularFile(path, LinkOption.NOFOLLOW_LINKS))
                        .toList()) {
                    String key = objects.relativize(file).toString();
                    if (key.startsWith(prefix)) {
                        addIfPresent(found, key, file);
                    }
                }
            } catch (UncheckedIOException | NoSuchFileException error) {
                // A directory was deleted meanwhile: what was found until then is listed.
                return null;
            }
            return null;
        });
        Comparator<ObjectInfo> byBytes = (one, other) -> Arrays.compareUnsigned(
                one.key().getBytes(StandardCharsets.UTF_8), other.key().getBytes(StandardCharsets.UTF_8));
        return found.stream().sorted(byBytes);
    }

    @Override
    public DeleteResult delete(Collection<String> keys) {
        check();
        List<String> deleted = new ArrayList<>();
        Map<String, String> failed = new LinkedHashMap<>();
        for (String key : keys) {
            Path path = pathOf(key);
            try {
                Files.deleteIfExists(path);
                deleted.add(key);
                removeEmptyParents(path);
            } catch (IOException error) {
                failed.put(key, error.toString());
            }
        }
        return new DeleteResult(deleted, failed);
    }

    @Override
    public void close() {
        // No file stays open between calls.
    }

    private void write(String key, Filling filling, boolean ifAbsent) {
        Path path = pathOf(key);
        check();
        call(key, () -> {
            Path folder = Files.createDirectories(root.resolve(".tmp"));
            Path temporary = folder.resolve(UUID.randomUUID().toString());
            try {
                try (FileChannel channel = FileChannel.open(
                        temporary, StandardOpenOption.CREATE_NEW, StandardOpenOption.WRITE)) {
                    filling.fill(channel);
                    channel.force(true);
                }
                // After the sync, or a crash could leave the name with incomplete bytes.
                move(key, temporary, path, ifAbsent);
            } finally {
                Files.deleteIfExists(temporary);
            }
            return null;
        });
    }

    private static void move(String key, Path temporary, Path path, boolean ifAbsent) throws IOException {
        for (int attempt = 1; ; attempt++) {
            try {
                Files.createDirectories(path.getParent());
                if (ifAbsent) {
                    Files.createLink(path, temporary); // a link never replaces a file, a move does
                } else {
                    Files.move(temporary, path, StandardCopyOption.ATOMIC_MOVE);
                }
                break;
            } catch (FileAlreadyExistsException error) {
                if (ifAbsent) {
                    throw new ObjectExistsException(key);
                }
                throw error;
            } catch (NoSuchFileException error) {
                // A delete in another thread removed the parent, empty until now.
                if (attempt == MOVE_TRIES) {
                    throw error;
                }
            }
        }
        // A move is durable only once the directory is synced.
        try (FileChannel directory = FileChannel.open(path.getParent(), StandardOpenOption.READ)) {
            directory.force(true);
        }
    }

    private static void writeAll(FileChannel channel, ByteBuffer data) throws IOException {
        while (data.hasRemaining()) {
            channel.write(data);
        }
    }

    private void removeEmptyParents(Path path) throws IOException {
        for (Path folder = path.getParent(); !folder.equals(objects); folder = folder.getParent()) {
            try {
                Files.deleteIfExists(folder);
            } catch (DirectoryNotEmptyException error) {
                return;
            }
        }
    }

    private Path pathOf(String key) {
        Keys.check(key);
        for (String segment : key.split("/", -1)) {
            boolean isName = !segment.isEmpty() && !segment.equals(".") && !segment.equals("..");
            if (!isName || segment.indexOf('\0') >= 0) {
                throw new InvalidKeyException(key, "segment '" + segment + "' is no file name");
            }
            if (segment.getBytes(StandardCharsets.UTF_8).length > 255) {
                throw new InvalidKeyException(key, "a segment is over the file name limit of 255 bytes");
            }
        }
        return objects.resolve(key);
    }

    private static void addIfPresent(List<ObjectInfo> found, String key, Path file) throws IOException {
        try {
            found.add(describe(key, file));
        } catch (NoSuchFileException error) {
            return; // it was deleted meanwhile
        }
    }

    private static ObjectInfo describe(String key, Path path) throws IOException {
        BasicFileAttributes facts =
                Files.readAttributes(path, BasicFileAttributes.class, LinkOption.NOFOLLOW_LINKS);
        if (!facts.isRegularFile()) {
            throw new ObjectNotFoundException(key);
        }
        long modified = facts.lastModifiedTime().toMillis();
        return new ObjectInfo(key, facts.size(), modified, facts.size() + "-" + facts.lastModifiedTime());
    }

    private <T> T call(String key, Call<T> call) {
        try {
            return call.run();
        } catch (NoSuchFileException | java.nio.file.NotDirectoryException error) {
            check(); // the directory itself may be missing
            throw new ObjectNotFoundException(key);
        } catch (java.nio.file.AccessDeniedException error) {
            throw new AccessDeniedException(
                    "object '" + key + "' in " + root + " can't be accessed. Fix its owner or mode", error);
        } catch (IOException error) {
            throw unavailable(key, error);
        }
    }

    private StoreUnavailableException unavailable(String key, IOException error) {
        return new StoreUnavailableException(
                "object '" + key + "' in " + root + ": " + error.getMessage() + ". Check the disk, then retry", error);
    }

    @FunctionalInterface
    private interface Call<T> {
        T run() throws IOException;
    }

    @FunctionalInterface
    private interface Filling {
        void fill(FileChannel channel) throws IOException;
    }
}
