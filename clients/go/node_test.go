package streammeta

import (
	"context"
	"net"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"

	v1 "streammeta.io/go/v1"
)

const sessionTimeout = 9 * time.Second

// fakeSessions answers heartbeats, and remembers when they came and which certificates sent them.
type fakeSessions struct {
	v1.UnimplementedNodeServiceServer

	mu      sync.Mutex
	beats   []time.Time
	callers []string
	outcome func(beat int) (v1.ErrorCode, error)
}

func (f *fakeSessions) Heartbeat(
	ctx context.Context, request *v1.HeartbeatRequest,
) (*v1.HeartbeatResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.beats = append(f.beats, time.Now())
	caller, _ := peer.FromContext(ctx)
	if info, ok := caller.AuthInfo.(credentials.TLSInfo); ok {
		f.callers = append(f.callers, info.State.PeerCertificates[0].Subject.CommonName)
	}
	answer := &v1.HeartbeatResponse{SessionTimeoutMs: sessionTimeout.Milliseconds()}
	if f.outcome == nil {
		return answer, nil
	}
	var err error
	answer.Error, err = f.outcome(len(f.beats))
	return answer, err
}

// keepAlive runs KeepAlive of a node for a time, which the bubble of synctest passes at once. It returns
// the error and the number of answers.
func keepAlive(t *testing.T, fake *fakeSessions, limit time.Duration) (error, int) {
	listener := bufconn.Listen(1 << 16)
	server := grpc.NewServer()
	v1.RegisterNodeServiceServer(server, fake)
	go server.Serve(listener)
	defer server.Stop()

	client, err := Dial([]string{"memory"})
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	client.conns["memory"], err = grpc.NewClient(
		"passthrough:///memory",
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) { return listener.Dial() }),
	)
	if err != nil {
		t.Fatal(err)
	}
	id, epoch := int32(1), int64(1)
	node := &Node{client, &v1.NodeIdentity{NodeId: &id, NodeEpoch: &epoch}}
	ctx, cancel := context.WithCancel(t.Context())
	defer time.AfterFunc(limit, cancel).Stop()
	answers := 0
	err = node.KeepAlive(ctx, func(*v1.HeartbeatResponse) { answers++ })
	return err, answers
}

func TestHeartbeatsComeThreeTimesInASession(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fake := &fakeSessions{}
		err, answers := keepAlive(t, fake, time.Minute-time.Second)
		if err != context.Canceled {
			t.Fatalf("the error is %v, expected the end of the context", err)
		}
		if len(fake.beats) != 20 || answers != 20 {
			t.Fatalf("%d heartbeats and %d answers, expected 20", len(fake.beats), answers)
		}
		for index := range fake.beats[1:] {
			if gap := fake.beats[index+1].Sub(fake.beats[index]); gap > sessionTimeout/3+time.Second {
				t.Fatalf("a heartbeat came %v after the one before", gap)
			}
		}
	})
}

func TestHeartbeatsOutliveControllersThatAreAway(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var since time.Time
		away := func(int) (v1.ErrorCode, error) {
			if since.IsZero() {
				since = time.Now()
			}
			if time.Since(since) < 2*defaultTimeout {
				return 0, status.Error(codes.Unavailable, "no leader")
			}
			return 0, nil
		}
		err, answers := keepAlive(t, &fakeSessions{outcome: away}, 5*time.Minute)
		if err != context.Canceled || answers < 60 {
			t.Fatalf("%d answers and %v, expected heartbeats until the end of the context", answers, err)
		}
	})
}

func TestHeartbeatsEndWhenOneIsRejected(t *testing.T) {
	denied := status.Error(codes.PermissionDenied, "another's node")
	for name, reject := range map[string]func() (v1.ErrorCode, error){
		"NODE_EPOCH_EXPIRED": func() (v1.ErrorCode, error) { return v1.ErrorCode_ERROR_CODE_NODE_EPOCH_EXPIRED, nil },
		"PermissionDenied":   func() (v1.ErrorCode, error) { return 0, denied },
	} {
		synctest.Test(t, func(t *testing.T) {
			fake := &fakeSessions{outcome: func(beat int) (v1.ErrorCode, error) {
				if beat > 3 {
					return reject()
				}
				return 0, nil
			}}
			err, answers := keepAlive(t, fake, time.Hour)
			if answers != 3 || err == nil || !strings.Contains(err.Error(), name) {
				t.Fatalf("%d answers, then %v, expected 3 and %s", answers, err, name)
			}
		})
	}
}
