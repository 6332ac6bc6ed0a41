package target

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/taskrelay/taskrelay/internal/webhook"
	"github.com/taskrelay/taskrelay/pkg/command"
)

const (
	headerStatus = "Task-Status"
	// A service written with nats.go's micro package says so when it fails.
	headerServiceCode  = "Nats-Service-Error-Code"
	headerServiceError = "Nats-Service-Error"

	// notConnected is the pause of a call that could not leave this process.
	notConnected = 5 * time.Second
)

// natsTarget sends a request. The answer tells what became of it by its header Task-Status, which takes HTTP's codes;
// an empty answer without one is done.
func natsTarget(nc *nats.Conn, subject string, key []byte) do {
	from := "NATS " + subject
	return func(ctx context.Context, call call) (json.RawMessage, error) {
		msg := &nats.Msg{Subject: subject, Data: call.body, Header: nats.Header{}}
		set := func(name, value string) { msg.Header[name] = []string{value} } // the case stays as it is
		propagate(ctx, call.header)
		for name, value := range call.header {
			set(name, value)
		}
		webhook.Sign(set, key, call.key, time.Now(), call.body)

		reply, err := nc.RequestMsgWithContext(ctx, msg)
		switch {
		case err == nil:
		case errors.Is(err, nats.ErrReconnectBufExceeded), errors.Is(err, nats.ErrConnectionReconnecting), errors.Is(err, nats.ErrDisconnected):
			// Nothing was sent and no service has failed: an outage of ours uses up no attempt.
			return nil, command.Snooze(notConnected)
		case errors.Is(err, nats.ErrNoResponders):
			return nil, &classError{class: "nats_no_responders", cause: err,
				text: fmt.Sprintf("%s has no responder: start the service", from)}
		default:
			return nil, &classError{class: "nats_no_answer", text: fmt.Sprintf("%s gave no answer: %s", from, err), cause: err}
		}

		a := answer{from: from, class: "nats", body: reply.Data, code: 200, retryAfter: reply.Header.Get("Retry-After"), date: reply.Header.Get("Date")}
		status := reply.Header.Get(headerStatus)
		if status == "" {
			if status = reply.Header.Get(headerServiceCode); status == "" && reply.Header.Get(headerServiceError) != "" {
				status = "500"
			}
			if status != "" && len(a.body) == 0 {
				a.body = []byte(reply.Header.Get(headerServiceError))
			}
		}
		if status == "" {
			if len(reply.Data) > 0 {
				return nil, unclear(from, "has a body but no header "+headerStatus)
			}
			return nil, nil
		}
		if a.code, err = strconv.Atoi(status); err != nil || a.code < 200 || a.code > 599 {
			return nil, unclear(from, "has the status "+strconv.Quote(clean([]byte(status), 64)))
		}
		return a.outcome()
	}
}

// unclear is an answer that may mean success or failure. It is tried again, so that a service that is mended in time
// loses nothing; taking it for success could lose a payment.
func unclear(from, what string) error {
	return &classError{class: "nats_unclear",
		text: fmt.Sprintf("%s: the answer %s: answer with %s: 200 when it is done, or with an HTTP code that says why not", from, what, headerStatus)}
}
