package outbox

import (
	"bytes"
	"encoding"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"unicode/utf8"
)

// encodePayload makes the text of the json column, which goes to the worker byte
// for byte. What it lets through Postgres takes: the column is json, not jsonb, so
// \u0000, half a surrogate pair, big numbers and the order of keys stay as they
// are.
func encodePayload(v any) (string, error) {
	var text string
	switch v := v.(type) {
	case nil:
		return "{}", nil
	case []byte:
		text = string(v)
	case json.RawMessage:
		text = string(v)
	case string:
		text = v
	default:
		text, err := marshal(v)
		if err != nil {
			return "", fmt.Errorf("payload: %w", err)
		}
		// encoding/json puts this escape, and no other way to say it, where a Go
		// string is not UTF-8. Money moves on these bytes: better refused than changed.
		if strings.Contains(text, `\ufffd`) && brokenText(reflect.ValueOf(v)) {
			return "", fmt.Errorf("payload: a string in %T is not valid UTF-8", v)
		}
		return text, checkSize(text)
	}

	if err := checkSize(text); err != nil {
		return "", err
	}
	if !utf8.ValidString(text) {
		return "", errors.New("payload is not valid UTF-8")
	}
	if b := []byte(text); !json.Valid(b) {
		// Slower, but says why: not JSON, or nested more than 10,000 deep, which no Go
		// program could read.
		err := json.Unmarshal(b, new(json.RawMessage))
		if text == "" {
			err = errors.New("it is empty")
		}
		return "", fmt.Errorf("payload is not JSON (strings and bytes are taken as they are; other values are encoded): %w", err)
	}
	return text, nil
}

func checkSize(payload string) error {
	if len(payload) > MaxPayload {
		return fmt.Errorf("payload is %d bytes, at most %d are allowed: store it elsewhere and enqueue a reference", len(payload), MaxPayload)
	}
	return nil
}

// marshal is json.Marshal without the escapes for <, > and &: the text is for
// programs and people, not for HTML.
func marshal(v any) (string, error) {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		return "", err
	}
	return strings.TrimSuffix(b.String(), "\n"), nil
}

var (
	jsonMarshaler = reflect.TypeFor[json.Marshaler]()
	textMarshaler = reflect.TypeFor[encoding.TextMarshaler]()
)

// brokenText tells whether v holds a string that is not UTF-8. Types that encode
// themselves answer for their own text. v has been encoded, so it has no cycles.
func brokenText(v reflect.Value) bool {
	if !v.IsValid() || v.Type().Implements(jsonMarshaler) || v.Type().Implements(textMarshaler) {
		return false
	}
	switch v.Kind() {
	case reflect.String:
		return !utf8.ValidString(v.String())
	case reflect.Pointer, reflect.Interface:
		return brokenText(v.Elem())
	case reflect.Struct:
		for i := range v.NumField() {
			f := v.Type().Field(i)
			if (f.IsExported() || f.Anonymous) && f.Tag.Get("json") != "-" && brokenText(v.Field(i)) {
				return true
			}
		}
	case reflect.Map:
		for k, e := range v.Seq2() {
			if brokenText(k) || brokenText(e) {
				return true
			}
		}
	case reflect.Slice, reflect.Array:
		if v.Type().Elem().Kind() == reflect.Uint8 {
			return false // base64
		}
		for i := range v.Len() {
			if brokenText(v.Index(i)) {
				return true
			}
		}
	}
	return false
}
