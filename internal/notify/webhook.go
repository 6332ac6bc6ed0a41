package notify

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
	"time"

	"github.com/taskrelay/taskrelay/internal/webhook"
	"github.com/taskrelay/taskrelay/pkg/outbox"
)

// Webhook posts notices as JSON, signed as Standard Webhooks 1.0.0 when there is a secret. The header webhook-id is the
// notice's: a receiver drops repetitions by it.
func Webhook(address, secret string) (outbox.Notifier, error) {
	p, err := newPoster(address)
	if err != nil {
		return nil, err
	}
	key, err := webhook.Key(secret)
	if err != nil {
		return nil, fmt.Errorf("secret: %w", err)
	}
	return func(ctx context.Context, n outbox.Notice) error {
		now := time.Now()
		body, err := json.Marshal(webhookBody{Type: "taskrelay." + n.Event, Timestamp: now.UTC(), Subject: n.Subject(), Text: n.Text(), Data: n})
		if err != nil {
			return err
		}
		_, err = p.post(ctx, body, func(req *http.Request) {
			req.Header.Set("webhook-id", n.ID)
			req.Header.Set("webhook-timestamp", strconv.FormatInt(now.Unix(), 10))
			webhook.Sign(req.Header.Set, key, n.ID, now, body)
		})
		return err
	}, nil
}

// webhookBody has the parts that Standard Webhooks asks for: type, timestamp and data.
type webhookBody struct {
	Type      string        `json:"type"` // taskrelay.dead…
	Timestamp time.Time     `json:"timestamp"`
	Subject   string        `json:"subject"`
	Text      string        `json:"text"`
	Data      outbox.Notice `json:"data"`
}
