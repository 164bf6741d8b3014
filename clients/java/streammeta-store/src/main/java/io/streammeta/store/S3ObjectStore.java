package io.streammeta.store;

import io.streammeta.store.S3Address.Checksum;
import java.io.IOException;
import java.io.InputStream;
import java.nio.ByteBuffer;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Collection;
import java.util.LinkedHashMap;
import java.util.LinkedHashSet;
import java.util.List;
import java.util.Map;
import java.util.function.Supplier;
import java.util.stream.Stream;
import software.amazon.awssdk.auth.credentials.AwsBasicCredentials;
import software.amazon.awssdk.auth.credentials.DefaultCredentialsProvider;
import software.amazon.awssdk.auth.credentials.StaticCredentialsProvider;
import software.amazon.awssdk.awscore.exception.AwsServiceException;
import software.amazon.awssdk.awscore.retry.AwsRetryStrategy;
import software.amazon.awssdk.core.checksums.RequestChecksumCalculation;
import software.amazon.awssdk.core.checksums.ResponseChecksumValidation;
import software.amazon.awssdk.core.exception.SdkClientException;
import software.amazon.awssdk.core.exception.SdkException;
import software.amazon.awssdk.core.sync.RequestBody;
import software.amazon.awssdk.http.urlconnection.UrlConnectionHttpClient;
import software.amazon.awssdk.regions.Region;
import software.amazon.awssdk.retries.DefaultRetryStrategy;
import software.amazon.awssdk.retries.api.RetryStrategy;
import software.amazon.awssdk.services.s3.LegacyMd5Plugin;
import software.amazon.awssdk.services.s3.S3Client;
import software.amazon.awssdk.services.s3.S3ClientBuilder;
import software.amazon.awssdk.services.s3.model.GetObjectRequest;
import software.amazon.awssdk.services.s3.model.HeadObjectResponse;
import software.amazon.awssdk.services.s3.model.ObjectIdentifier;
import software.amazon.awssdk.services.s3.model.PutObjectRequest;

/** A bucket of Amazon S3, or of a server that speaks its protocol. */
final class S3ObjectStore implements ObjectStore {
    private static final int KEYS_PER_DELETE = 1000;
    private static final int ATTEMPTS = 5;
    private static final Duration CONNECT = Duration.ofSeconds(5);
    /** Wait of an attempt for the server's next byte. */
    private static final Duration SILENCE = Duration.ofSeconds(30);

    private final S3Address address;
    private final S3Client client;
    /** Sends each request once: after a lost answer, a repeat of a conditional put would find its own object. */
    private final S3Client once;

    S3ObjectStore(S3Address address) {
        this.address = address;
        RetryStrategy standard = AwsRetryStrategy.standardRetryStrategy()
                .toBuilder()
                .maxAttempts(ATTEMPTS)
                .build();
        this.client = connect(address, standard);
        this.once = connect(address, DefaultRetryStrategy.doNotRetry());
    }

    private static S3Client connect(S3Address address, RetryStrategy retries) {
        S3ClientBuilder builder = S3Client.builder()
                .httpClientBuilder(
                        UrlConnectionHttpClient.builder().connectionTimeout(CONNECT).socketTimeout(SILENCE))
                .region(Region.of(address.region()))
                .forcePathStyle(address.isPathStyle())
                .overrideConfiguration(options -> options.retryStrategy(retries))
                // Many servers support neither checksum trailers nor checksums of ranges.
                .requestChecksumCalculation(RequestChecksumCalculation.WHEN_REQUIRED)
                .responseChecksumValidation(ResponseChecksumValidation.WHEN_REQUIRED)
                .credentialsProvider(
                        address.accessKey().isEmpty()
                                ? DefaultCredentialsProvider.builder().build()
                                : StaticCredentialsProvider.create(
                                        AwsBasicCredentials.create(address.accessKey(), address.secretKey())));
        address.endpoint().ifPresent(builder::endpointOverride);
        if (address.checksum() == Checksum.MD5) {
            builder.addPlugin(LegacyMd5Plugin.create());
        }
        return builder.build();
    }

    @Override
    public void check() {
        call("", () -> client.headBucket(request -> request.bucket(address.bucket())));
    }

    @Override
    public void put(String key, ByteBuffer data) {
        PutObjectRequest request = digested(put(key), Digests.of(address.checksum(), data));
        call(key, () -> client.putObject(request, RequestBody.fromRemainingByteBuffer(data.duplicate())));
    }

    @Override
    public void put(String key, Path file) {
        String digest;
        try (InputStream bytes = Files.newInputStream(file)) {
            digest = Digests.of(address.checksum(), bytes);
        } catch (IOException error) {
            throw new StoreRejectedException("file " + file + " can't be read: " + error.getMessage(), error);
        }
        PutObjectRequest request = digested(put(key), digest);
        call(key, () -> client.putObject(request, RequestBody.fromFile(file)));
    }

    @Override
    public void putIfAbsent(String key, ByteBuffer data) {
        PutObjectRequest request = digested(
                put(key).toBuilder().ifNoneMatch("*").build(), Digests.of(address.checksum(), data));
        call(key, () -> once.putObject(request, RequestBody.fromRemainingByteBuffer(data.duplicate())));
    }

    @Override
    public byte[] get(String key) {
        Keys.check(key);
        return call(key, () -> client.getObjectAsBytes(named(key).build()).asByteArrayUnsafe());
    }

    @Override
    public byte[] getRange(String key, long start, long end) {
        GetObjectRequest request = get(key, start, end);
        return call(key, start, () -> client.getObjectAsBytes(request).asByteArrayUnsafe());
    }

    @Override
    public InputStream openRange(String key, long start, long end) {
        GetObjectRequest request = get(key, start, end);
        return call(key, start, () -> {
            var answer = client.getObject(request);
            return new AbortingInputStream(answer, answer.response().contentLength());
        });
    }

    @Override
    public ObjectInfo head(String key) {
        Keys.check(key);
        HeadObjectResponse answer =
                call(key, () -> client.headObject(request -> request.bucket(address.bucket()).key(key)));
        return new ObjectInfo(
                key, answer.contentLength(), answer.lastModified().toEpochMilli(), answer.eTag());
    }

    @Override
    public Stream<ObjectInfo> list(String prefix) {
        return call(prefix, () -> client
                .listObjectsV2Paginator(request -> request.bucket(address.bucket()).prefix(prefix))
                .contents()
                .stream()
                .map(object -> new ObjectInfo(
                        object.key(), object.size(), object.lastModified().toEpochMilli(), object.eTag())));
    }

    @Override
    public DeleteResult delete(Collection<String> keys) {
        List<String> wanted = List.copyOf(new LinkedHashSet<>(keys));
        List<String> deleted = new ArrayList<>();
        Map<String, String> failed = new LinkedHashMap<>();
        for (int at = 0; at < wanted.size(); at += KEYS_PER_DELETE) {
            List<String> batch = wanted.subList(at, Math.min(wanted.size(), at + KEYS_PER_DELETE));
            batch.forEach(Keys::check);
            List<ObjectIdentifier> named = batch.stream()
                    .map(key -> ObjectIdentifier.builder().key(key).build())
                    .toList();
            var answer = call(batch.get(0), () -> client.deleteObjects(request ->
                    request.bucket(address.bucket()).delete(delete -> delete.objects(named).quiet(true))));
            // An absent key is no error of a deletion, but some servers report it.
            answer.errors().stream()
                    .filter(error -> !"NoSuchKey".equals(error.code()))
                    .forEach(error -> failed.put(error.key(), error.code() + " " + error.message()));
            batch.stream().filter(key -> !failed.containsKey(key)).forEach(deleted::add);
        }
        return new DeleteResult(deleted, failed);
    }

    @Override
    public void close() {
        client.close();
        once.close();
    }

    private PutObjectRequest put(String key) {
        Keys.check(key);
        return PutObjectRequest.builder().bucket(address.bucket()).key(key).build();
    }

    private PutObjectRequest digested(PutObjectRequest request, String digest) {
        PutObjectRequest.Builder builder = request.toBuilder();
        return switch (address.checksum()) {
            case MD5 -> builder.contentMD5(digest).build();
            case CRC32 -> builder.checksumCRC32(digest).build();
            case CRC32C -> builder.checksumCRC32C(digest).build();
        };
    }

    private GetObjectRequest.Builder named(String key) {
        return GetObjectRequest.builder().bucket(address.bucket()).key(key);
    }

    private GetObjectRequest get(String key, long start, long end) {
        Keys.check(key);
        Keys.checkRange(start, end);
        return named(key).range("bytes=" + start + "-" + (end - 1)).build();
    }

    private <T> T call(String key, Supplier<T> call) {
        return call(key, 0, call);
    }

    private <T> T call(String key, long start, Supplier<T> call) {
        try {
            return call.get();
        } catch (AwsServiceException error) {
            throw translate(key, start, error);
        } catch (SdkClientException error) {
            throw new StoreUnavailableException(
                    "object '" + key + "' in " + address + ": " + error.getMessage() + ". Check the store, then retry",
                    error);
        } catch (SdkException error) {
            throw new StoreRejectedException("object '" + key + "' in " + address + ": " + error.getMessage(), error);
        }
    }

    private StorageException translate(String key, long start, AwsServiceException error) {
        String code = error.awsErrorDetails() == null ? "" : error.awsErrorDetails().errorCode();
        String words = "object '" + key + "' in " + address + ": " + error.statusCode() + " " + code;
        return switch (error.statusCode()) {
            // A request without a key, or an answer that says so, concerns the bucket.
            case 404 -> key.isEmpty() || "NoSuchBucket".equals(code)
                    ? new BucketNotFoundException(address.bucket())
                    : new ObjectNotFoundException(key);
            case 412 -> new ObjectExistsException(key);
            case 416 -> new RangeNotSatisfiableException(key, start);
            case 401, 403 -> new AccessDeniedException(
                    words + ". Check the keys, the clock and the policy of the bucket", error);
            // 409 is a conditional put beside another one that has not ended.
            case 408, 409, 429, 500, 502, 503, 504 -> new StoreUnavailableException(words + ". Retry later", error);
            default -> new StoreRejectedException(words + ". See the store's log for the reason", error);
        };
    }
}
