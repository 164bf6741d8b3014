package streammeta

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"errors"
	"fmt"
	"iter"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/protobuf/proto"

	v1 "streammeta.io/go/v1"
)

const (
	defaultTimeout = 30 * time.Second
	attemptTimeout = 5 * time.Second // after which another controller is asked
	keepaliveTime  = 10 * time.Second
)

// Tags are labels of a stream or node: at most 16.
type Tags map[string]string

func (t Tags) encode() []*v1.Tag {
	tags := make([]*v1.Tag, 0, len(t))
	for key, value := range t {
		tags = append(tags, &v1.Tag{Key: key, Value: value})
	}
	slices.SortFunc(tags, func(a, b *v1.Tag) int { return strings.Compare(a.Key, b.Key) })
	return tags
}

// Option changes how a client connects.
type Option func(*Client)

// WithTLS makes the client connect over TLS. Set config.GetClientCertificate to load a renewed
// certificate without a restart.
func WithTLS(config *tls.Config) Option {
	return func(c *Client) { c.credentials = credentials.NewTLS(config) }
}

// WithTimeout bounds each call whose context has no deadline. The default is 30 s.
func WithTimeout(timeout time.Duration) Option {
	return func(c *Client) { c.timeout = timeout }
}

// Client is a connection to a cluster. It is safe for concurrent use.
type Client struct {
	router      *router
	credentials credentials.TransportCredentials
	timeout     time.Duration

	mu     sync.Mutex
	conns  map[string]*grpc.ClientConn
	closed bool
}

// Dial returns a client of the cluster that has controllers at endpoints (host:port). One reachable
// endpoint is enough: the others are learned. It does not connect yet.
func Dial(endpoints []string, options ...Option) (*Client, error) {
	if len(endpoints) == 0 || slices.Contains(endpoints, "") {
		return nil, fmt.Errorf("endpoints are %q, expected at least one host:port", endpoints)
	}
	client := &Client{
		router:      newRouter(endpoints),
		credentials: insecure.NewCredentials(),
		timeout:     defaultTimeout,
		conns:       map[string]*grpc.ClientConn{},
	}
	for _, option := range options {
		option(client)
	}
	return client, nil
}

// Close ends all calls and connections.
func (c *Client) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	var failures []error
	for _, conn := range c.conns {
		failures = append(failures, conn.Close())
	}
	clear(c.conns)
	return errors.Join(failures...)
}

func (c *Client) conn(endpoint string) (*grpc.ClientConn, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil, errors.New("the client is closed")
	}
	if conn, ok := c.conns[endpoint]; ok {
		return conn, nil
	}
	conn, err := grpc.NewClient(
		endpoint,
		grpc.WithTransportCredentials(c.credentials),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: keepaliveTime}),
	)
	if err != nil {
		return nil, err
	}
	c.conns[endpoint] = conn
	return conn, nil
}

// message is a pointer to a generated struct.
type message[T any] interface {
	*T
	proto.Message
}

// call sends a request to the leader until it answers, fails permanently, or time is up. The error is
// the last failure. If an earlier attempt of a write may have taken effect, its outcome is unknown.
func call[T any, Answer message[T]](
	ctx context.Context, c *Client, method string, request proto.Message,
) (Answer, error) {
	answer, _, err := callCounted[T, Answer](ctx, c, method, request)
	return answer, err
}

// callCounted is call, and returns the number of attempts too.
func callCounted[T any, Answer message[T]](
	ctx context.Context, c *Client, method string, request proto.Message,
) (Answer, int, error) {
	ctx, cancel := c.bound(ctx)
	defer cancel()

	unknown := false
	for attempts := 1; ; attempts++ {
		endpoint := c.router.leader()
		conn, err := c.conn(endpoint)
		if err != nil {
			return nil, attempts, err
		}
		answer := Answer(new(T))
		attempt, cancel := context.WithTimeout(ctx, attemptTimeout)
		err = conn.Invoke(attempt, method, request, answer)
		cancel()
		if err == nil {
			c.router.recordAnswer(endpoint)
			return answer, attempts, nil
		}

		failure := readError(endpoint, err)
		unknown = unknown || failure.unknown
		failure.unknown = unknown
		if kindOf(failure) == final {
			return nil, attempts, failure
		}
		if !sleep(ctx, c.router.recordFailure(endpoint, failure)) {
			failure.cause = errors.Join(ctx.Err(), failure.cause)
			return nil, attempts, failure
		}
	}
}

// bound returns ctx with the client's timeout, unless it has a deadline.
func (c *Client) bound(ctx context.Context) (context.Context, context.CancelFunc) {
	if _, ok := ctx.Deadline(); ok {
		return ctx, func() {}
	}
	return context.WithTimeout(ctx, c.timeout)
}

// newRequestID returns an id under which controllers recognize a repeated request.
func newRequestID() string { return rand.Text() }

// sleep waits, and reports false if the context ends first.
func sleep(ctx context.Context, wait time.Duration) bool {
	if ctx.Err() != nil {
		return false
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// DescribeCluster describes the cluster as one of its controllers knows it.
func (c *Client) DescribeCluster(ctx context.Context) (*v1.DescribeClusterResponse, error) {
	return call[v1.DescribeClusterResponse](
		ctx, c, v1.AdminService_DescribeCluster_FullMethodName, &v1.DescribeClusterRequest{})
}

// pages yields the items of all pages. fetch returns the page at token and the next token, which is
// empty after the last page.
func pages[T any](fetch func(token string) ([]T, string, error)) iter.Seq2[T, error] {
	return func(yield func(T, error) bool) {
		token := ""
		for {
			items, next, err := fetch(token)
			if err != nil {
				var none T
				yield(none, err)
				return
			}
			for _, item := range items {
				if !yield(item, nil) {
					return
				}
			}
			if next == "" {
				return
			}
			token = next
		}
	}
}
