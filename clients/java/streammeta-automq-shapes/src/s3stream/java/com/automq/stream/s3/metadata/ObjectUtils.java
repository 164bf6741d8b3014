package com.automq.stream.s3.metadata;

/** Shape of the names of objects in the bucket. */
public class ObjectUtils {
    private static String namespace = "";

    public static void setNamespace(String namespace) {
        ObjectUtils.namespace = namespace;
    }

    public static String getNamespace() {
        return namespace;
    }
}
