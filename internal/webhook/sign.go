// Package webhook signs what is posted, as Standard Webhooks 1.0.0 says, so that a receiver in any language can check it
// with a library that exists.
package webhook

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"strconv"
	"strings"
	"time"
)

// Key reads a secret of Standard Webhooks 1.0.0: whsec_ and the key in base64. Any other text is the key.
func Key(secret string) ([]byte, error) {
	b64, ok := strings.CutPrefix(secret, "whsec_")
	if !ok {
		return []byte(secret), nil
	}
	key, err := base64.StdEncoding.DecodeString(b64)
	if err != nil || len(key) == 0 {
		return nil, errors.New("expected whsec_ and the key in base64") // err would show a part of it
	}
	return key, nil
}

// Sign sets the three headers of Standard Webhooks 1.0.0. Without a key it does nothing. The id is the
// same for each attempt (the idempotency key of a task); the timestamp is this attempt's, so that a receiver can
// refuse old copies.
func Sign(set func(name, value string), key []byte, id string, now time.Time, body []byte) {
	if len(key) == 0 {
		return
	}
	timestamp := strconv.FormatInt(now.Unix(), 10)
	mac := hmac.New(sha256.New, key)
	mac.Write([]byte(id + "." + timestamp + "."))
	mac.Write(body)
	set("webhook-id", id)
	set("webhook-timestamp", timestamp)
	set("webhook-signature", "v1,"+base64.StdEncoding.EncodeToString(mac.Sum(nil)))
}
