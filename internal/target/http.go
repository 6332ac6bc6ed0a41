package target

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"time"

	"go.opentelemetry.io/otel/metric"

	"github.com/taskrelay/taskrelay/internal/webhook"
)

// bodyTime is how long an answer's body may take after its headers: the status has decided the outcome by then, and
// an endless body must not hold a slot until the attempt times out.
const bodyTime = 10 * time.Second

type client struct {
	http *http.Client
	took metric.Float64Histogram // nil: not counted
}

func newClient(concurrency int) client {
	dialer := &net.Dialer{Timeout: 10 * time.Second, KeepAlive: 15 * time.Second}
	return client{http: &http.Client{
		Transport: &http.Transport{
			// No Proxy: the environment of a worker must not redirect business calls by accident.
			DialContext:            dialer.DialContext,
			TLSHandshakeTimeout:    10 * time.Second,
			MaxIdleConnsPerHost:    max(concurrency, 2),
			IdleConnTimeout:        30 * time.Second,
			MaxResponseHeaderBytes: 64 << 10,
			DisableCompression:     true, // a cap on bytes read is then a cap on memory
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		// The attempt's context is the time limit.
	}}
}

// target posts to one address.
func (c client) target(address string, key []byte) (do, error) {
	u, err := url.Parse(address)
	if err != nil || u.Host == "" {
		return nil, errors.New("no http address") // without the address: it may hold a token
	}
	from := "HTTP " + u.Host
	return func(ctx context.Context, call call) (json.RawMessage, error) {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, address, bytes.NewReader(call.body))
		if err != nil {
			return nil, transportError(from, err)
		}
		propagate(ctx, call.header)
		for name, value := range call.header {
			req.Header.Set(name, value)
		}
		// net/http repeats a POST by itself when it sees the canonical Idempotency-Key and a reused connection
		// breaks before an answer: calls that no attempt log would show. Header names have no case, so the lower
		// case one says the same to the endpoint.
		delete(req.Header, headerKey)
		req.Header["idempotency-key"] = []string{call.key}
		req.Header.Set("Content-Type", "application/json")
		req.Header.Set("User-Agent", "taskrelay")
		webhook.Sign(req.Header.Set, key, call.key, time.Now(), call.body)

		began := time.Now()
		resp, err := c.http.Do(req)
		if err != nil {
			c.answered(ctx, u.Host, 0, began)
			return nil, transportError(from, err)
		}
		defer resp.Body.Close()
		stop := time.AfterFunc(bodyTime, cancel)
		defer stop.Stop()
		var body []byte
		if resp.StatusCode != http.StatusSwitchingProtocols {
			// An error while reading changes nothing: the status is here, and it decides.
			body, _ = io.ReadAll(io.LimitReader(resp.Body, maxResult+1))
		} // else the body is the bare connection, which ends with no context: a read would hold the slot for ever
		c.answered(ctx, u.Host, resp.StatusCode, began)
		a := answer{from: from, class: "http", code: resp.StatusCode, body: body,
			retryAfter: resp.Header.Get("Retry-After"), date: resp.Header.Get("Date")}
		if l, err := resp.Location(); err == nil {
			a.location = l.Host
		}
		return a.outcome()
	}, nil
}

// transportError is an error without an answer: tried again. The address in net/http's own text may hold a token.
func transportError(from string, err error) error {
	if u, ok := errors.AsType[*url.Error](err); ok {
		err = u.Err
	}
	return &classError{class: "http_no_answer", text: fmt.Sprintf("%s gave no answer: %s", from, err), cause: err}
}
