package streammeta

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	v1 "streammeta.io/go/v1"
)

const (
	domain = "streammeta"

	reasonNotLeader      = "NOT_LEADER"
	reasonOutcomeUnknown = "OUTCOME_UNKNOWN"
	reasonLimitExceeded  = "LIMIT_EXCEEDED"
	reasonQuotaExceeded  = "QUOTA_EXCEEDED"
)

// Error is the failure of a whole call.
//
// Reason and Metadata come from a controller and are stable: programs decide by them. They are
// empty if the transport failed.
type Error struct {
	Endpoint   string
	Code       codes.Code
	Reason     string
	Metadata   map[string]string
	Message    string
	RetryAfter time.Duration // at least this long before a repetition, 0 if unspecified

	unknown bool
	cause   error
}

func (e *Error) Error() string {
	name := e.Reason
	if name == "" {
		name = e.Code.String()
	}
	return fmt.Sprintf("%s: %s: %s", e.Endpoint, name, e.Message)
}

// Unwrap returns the gRPC error, or the error of the context that ended the call.
func (e *Error) Unwrap() error { return e.cause }

// OutcomeUnknown reports whether a write may have taken effect.
func (e *Error) OutcomeUnknown() bool { return e.unknown }

// ItemError is the outcome of one item of a call, such as a stream or an object. The other items of
// the call stand.
type ItemError struct {
	Item string // what failed, for people
	Code v1.ErrorCode
}

func (e *ItemError) Error() string { return e.Item + ": " + CodeName(e.Code) }

// CodeName returns the name of an outcome without its prefix, such as "STREAM_FENCED".
func CodeName(code v1.ErrorCode) string {
	return strings.TrimPrefix(code.String(), "ERROR_CODE_")
}

// HasCode reports whether err is the outcome code of an item.
func HasCode(err error, code v1.ErrorCode) bool {
	var item *ItemError
	return errors.As(err, &item) && item.Code == code
}

func itemError(code v1.ErrorCode, format string, args ...any) error {
	if code == v1.ErrorCode_ERROR_CODE_NONE {
		return nil
	}
	return &ItemError{Item: fmt.Sprintf(format, args...), Code: code}
}

// readError returns the failure of a call to endpoint, with the details that a controller adds.
func readError(endpoint string, err error) *Error {
	state := status.Convert(err)
	failure := &Error{Endpoint: endpoint, Code: state.Code(), Message: state.Message(), cause: err}
	for _, detail := range state.Details() {
		switch detail := detail.(type) {
		case *errdetails.ErrorInfo:
			// Proxies add details of their own.
			if detail.GetDomain() == domain {
				failure.Reason, failure.Metadata = detail.GetReason(), detail.GetMetadata()
			}
		case *errdetails.RetryInfo:
			failure.RetryAfter = detail.GetRetryDelay().AsDuration()
		}
	}
	kind := kindOf(failure)
	failure.unknown = kind == unreachable || kind == timedOut || kind == outcomeUnknown
	return failure
}

// failureKind tells how a failed call may be followed by another attempt.
type failureKind int

const (
	final          failureKind = iota // the same request would fail again
	unreachable                       // no connection, or it broke
	timedOut                          // connected, but no answer in time
	notLeader                         // answered by a controller that does not lead
	outcomeUnknown                    // it led, and lost leadership while it replicated the request
	notNow                            // it leads and accepted nothing: busy, a full disk
)

func kindOf(failure *Error) failureKind {
	switch failure.Code {
	case codes.Unavailable:
		switch failure.Reason {
		case reasonNotLeader:
			return notLeader
		case "":
			return unreachable
		}
		return notNow
	case codes.ResourceExhausted:
		// Waiting makes no room in a quota, unless the controller expects it.
		isFull := failure.Reason == reasonQuotaExceeded && failure.RetryAfter == 0
		if failure.Reason == "" || failure.Reason == reasonLimitExceeded || isFull {
			return final
		}
		return notNow
	case codes.Canceled:
		return unreachable
	case codes.DeadlineExceeded:
		return timedOut
	case codes.Aborted:
		if failure.Reason == reasonOutcomeUnknown {
			return outcomeUnknown
		}
	case codes.Internal:
		// Without a reason the transport wrote it.
		if failure.Reason == "" {
			return unreachable
		}
	}
	return final
}
