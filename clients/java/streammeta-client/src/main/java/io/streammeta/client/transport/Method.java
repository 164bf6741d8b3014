package io.streammeta.client.transport;

import com.google.protobuf.Message;
import io.grpc.MethodDescriptor;
import io.grpc.MethodDescriptor.MethodType;
import io.grpc.protobuf.ProtoUtils;

/**
 * A method of the contract.
 *
 * @param name service and method, such as {@code KVService/PutKVs}
 * @param request an empty request
 * @param answer an empty answer
 * @param leaderOnly whether the leader answers. Otherwise any controller does
 * @param isRead whether the call changes nothing
 */
public record Method<Q extends Message, A extends Message>(
        String name, Q request, A answer, boolean leaderOnly, boolean isRead) {
    private static final String PACKAGE = "streammeta.v1.";

    MethodDescriptor<Q, A> descriptor(MethodType type) {
        return MethodDescriptor.<Q, A>newBuilder()
                .setType(type)
                .setFullMethodName(PACKAGE + name)
                .setRequestMarshaller(ProtoUtils.marshaller(request))
                .setResponseMarshaller(ProtoUtils.marshaller(answer))
                .build();
    }
}
