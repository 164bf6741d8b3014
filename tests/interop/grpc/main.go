// Runs one of grpc-go's interoperability cases against a server; exits with 0 if it passed.
//
// Arguments: address and case. With `--cases` it prints the cases' names, one a line. They are those
// of gRPC's interop-test-descriptions.md that need no credentials, and of them those that grpc-go has.
package main

import (
	"context"
	"fmt"
	"maps"
	"os"
	"slices"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/interop"
	testgrpc "google.golang.org/grpc/interop/grpc_testing"
)

// Time of the longest case, far above what it takes.
const patience = 60 * time.Second

type connected struct {
	address string
	channel *grpc.ClientConn
	service testgrpc.TestServiceClient
}

type interopCase func(context.Context, connected)

// onService returns the case of a function that asks the test service alone.
func onService(do func(context.Context, testgrpc.TestServiceClient, ...grpc.CallOption)) interopCase {
	return func(ctx context.Context, to connected) { do(ctx, to.service) }
}

var cases = map[string]interopCase{
	"empty_unary":                 onService(interop.DoEmptyUnaryCall),
	"large_unary":                 onService(interop.DoLargeUnaryCall),
	"client_streaming":            onService(interop.DoClientStreaming),
	"server_streaming":            onService(interop.DoServerStreaming),
	"ping_pong":                   onService(interop.DoPingPong),
	"empty_stream":                onService(interop.DoEmptyStream),
	"timeout_on_sleeping_server":  onService(interop.DoTimeoutOnSleepingServer),
	"cancel_after_begin":          onService(interop.DoCancelAfterBegin),
	"cancel_after_first_response": onService(interop.DoCancelAfterFirstResponse),
	"status_code_and_message":     onService(interop.DoStatusCodeAndMessage),
	"special_status_message":      onService(interop.DoSpecialStatusMessage),
	"custom_metadata":             onService(interop.DoCustomMetadata),
	"pick_first_unary": func(ctx context.Context, to connected) {
		interop.DoPickFirstUnary(ctx, to.service)
	},
	"unimplemented_method": func(ctx context.Context, to connected) {
		interop.DoUnimplementedMethod(ctx, to.channel)
	},
	"unimplemented_service": func(ctx context.Context, to connected) {
		interop.DoUnimplementedService(ctx, testgrpc.NewUnimplementedServiceClient(to.channel))
	},
	"rpc_soak": func(ctx context.Context, to connected) {
		interop.DoSoakTest(ctx, soak(to, func() (*grpc.ClientConn, func()) { return to.channel, func() {} }))
	},
	"channel_soak": func(ctx context.Context, to connected) {
		interop.DoSoakTest(ctx, soak(to, func() (*grpc.ClientConn, func()) {
			channel := dial(to.address)
			return channel, func() { channel.Close() }
		}))
	},
}

func soak(to connected, channel func() (*grpc.ClientConn, func())) interop.SoakTestConfig {
	return interop.SoakTestConfig{
		RequestSize: 271828, ResponseSize: 314159,
		PerIterationMaxAcceptableLatency: patience, OverallTimeout: patience,
		ServerAddr: to.address, NumWorkers: 2, Iterations: 20, ChannelForTest: channel,
	}
}

func dial(address string) *grpc.ClientConn {
	channel, err := grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	must(err)
	return channel
}

func main() {
	if os.Args[1] == "--cases" {
		for _, name := range slices.Sorted(maps.Keys(cases)) {
			fmt.Println(name)
		}
		return
	}
	address, name := os.Args[1], os.Args[2]
	do, ok := cases[name]
	if !ok {
		must(fmt.Errorf("there is no case %s", name))
	}

	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	channel := dial(address)
	defer channel.Close()
	// It ends the process if the case fails.
	do(ctx, connected{address, channel, testgrpc.NewTestServiceClient(channel)})
}

func must(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
