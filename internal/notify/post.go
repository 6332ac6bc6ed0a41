package notify

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"time"
)

const (
	// postTime is what one POST may take, its answer included. Less than a notifier may take: this error says more.
	postTime   = 15 * time.Second
	answerSize = 16 << 10
)

// poster posts to one address.
type poster struct {
	address string
	host    string // what errors and logs may show
	client  *http.Client
}

func newPoster(address string) (poster, error) {
	u, err := url.Parse(address)
	if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
		return poster{}, errors.New("expected an http:// or https:// address") // err would show it, with its token
	}
	dialer := &net.Dialer{Timeout: 10 * time.Second}
	return poster{address: address, host: u.Host, client: &http.Client{
		Transport: &http.Transport{
			// No Proxy: the environment must not redirect what may hold names of customers.
			DialContext:            dialer.DialContext,
			TLSHandshakeTimeout:    10 * time.Second,
			MaxResponseHeaderBytes: 16 << 10,
			DisableCompression:     true, // a cap on bytes read is then a cap on memory
			DisableKeepAlives:      true, // at most one message a minute and type
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}}, nil
}

// post sends body as JSON and returns what was answered to it with a 2xx. change may alter the request, or be nil.
func (p poster) post(ctx context.Context, body []byte, change func(*http.Request)) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, postTime)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, p.address, bytes.NewReader(body))
	if err != nil {
		return nil, errors.New("no request can be made for this address")
	}
	req.Header.Set("Content-Type", "application/json; charset=utf-8")
	req.Header.Set("User-Agent", "taskrelay")
	if change != nil {
		change(req)
	}
	resp, err := p.client.Do(req)
	if err != nil {
		if u, ok := errors.AsType[*url.Error](err); ok {
			err = u.Err // its own text shows the address
		}
		return nil, fmt.Errorf("%s gave no answer: %w", p.host, err)
	}
	defer resp.Body.Close()
	if code := resp.StatusCode; code < 200 || code > 299 {
		if code >= 300 && code < 400 {
			return nil, fmt.Errorf("%s answered %d, a redirect, which is not followed: configure the address it leads to", p.host, code)
		}
		return nil, fmt.Errorf("%s answered %d %s", p.host, code, http.StatusText(code))
	}
	answer, err := io.ReadAll(io.LimitReader(resp.Body, answerSize))
	if err != nil {
		return nil, fmt.Errorf("read the answer of %s: %w", p.host, err)
	}
	return answer, nil
}
